"""Another framework's file as a list of settings: scripts and override lists, YAML, JSON, Python. Nothing runs."""

from __future__ import annotations

import ast
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from dapo.errors import ConfigError
from dapo.peers.settings import LARGEST, Setting
from dapo.peers.shell import Word, arithmetic, commands_of

LARGEST_FILE = 1 << 20
MOST_SETTINGS = 10_000
MOST_NAMES = 6  # that a data set is handed on by, and assignments to each that are looked at

_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_PROGRAM = re.compile(r"openrlhf|train_ppo|^grpo$|^rloo$|\.py$")
# What TRL's users write beside GRPOConfig or RLOOConfig, and the prefix under which its arguments are kept.
_TRL_CALLS = {
    "GRPOConfig": "",
    "GRPOTrainer": "trainer.",
    "RLOOConfig": "",
    "RLOOTrainer": "trainer.",
    "LoraConfig": "lora.",
    "BitsAndBytesConfig": "bnb.",
    "load_dataset": "dataset.",
    "get_soft_overlong_punishment": "overlong.",
}
_LOADERS = ("load_dataset", "load_from_disk", "concatenate_datasets", "from_list", "from_dict", "from_generator")
# What changes the rows of a data set before training, as a method of it.
_ROW_CHANGES = {
    "map", "filter", "select", "take", "skip", "train_test_split", "shuffle", "rename_column", "rename_columns",
    "remove_columns",
}  # fmt: skip
_POSITIONS = {
    "load_dataset": ("path", "name"),
    "GRPOTrainer": ("model", "reward_funcs"),
    "RLOOTrainer": ("model", "reward_funcs"),
}
RLOO = "(RLOO)"  # a setting by this name: the file is one of TRL's RLOO, whose keys have other defaults


def read_text(path: Path) -> str:
    """The file as text, or one message about why not."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder.", remedy="Name a script, a YAML or JSON file, or a Python file.")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never end, nor does /dev/zero
            raise ConfigError(f"{path}: is no regular file.", remedy="Write what it holds to a file and name that.")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigError(f"{path}: larger than 1 MiB; this is not a config.", remedy="Name the config alone.")
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.", remedy="Check the name.") from None


def overrides_in(text: str) -> list[Setting]:
    """Hydra's `a.b=value`, wherever they stand in a script: on the command line, in an array, one per line."""
    found = []
    for command in commands_of(text):
        for word in command:
            override = _OVERRIDE.fullmatch(word.text)
            if override is not None:
                found.append(Setting(override[1], override[2], word.line))
    return found


def flags_in(text: str) -> list[Setting]:
    """`--key value`, `--key=value`, `--key a b` and a bare `--key`, after the program's name where there is one."""
    found: list[Setting] = []
    for command in commands_of(text):
        found += flags_of(command[after_program(command) :])
    return found


def after_program(command: list[Word]) -> int:
    """Where the program's own flags begin; a flag's value, such as a reward in reward.py, is no program."""
    for at, word in enumerate(command):
        follows_flag = at > 0 and _FLAG.fullmatch(command[at - 1].text) is not None
        if _PROGRAM.search(word.text) and not word.text.startswith("-") and not follows_flag:
            return at + 1
    return 0


def flags_of(words: list[Word]) -> Iterator[Setting]:
    at = 0
    while at < len(words):
        flag = _FLAG.fullmatch(words[at].text)
        line = words[at].line
        at += 1
        if flag is None:
            continue
        values = [] if flag[2] is None else [flag[2]]
        while at < len(words) and _FLAG.fullmatch(words[at].text) is None:
            values.append(words[at].text)
            at += 1
        value: Any = True if not values else values[0] if len(values) == 1 else values
        yield Setting(flag[1], value, line)


def tree_in(text: str, path: Path) -> list[Setting]:
    """A YAML or JSON file, flattened with dots; aliases are followed, and a file that explodes is refused."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(
            f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}.", remedy="Fix the line."
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; this is not a config.") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}, line 1: no keys and values.", remedy="Name a config file of verl or TRL.")
    found: list[Setting] = []
    collect(root, "", found, path, depth=0)
    return found


def collect(node: yaml.MappingNode, prefix: str, found: list[Setting], path: Path, depth: int) -> None:
    for key, value in node.value:
        if len(found) >= MOST_SETTINGS or depth > 30:
            raise ConfigError(f"{path}: more than {MOST_SETTINGS:,} settings, or too deep; this is not a config.")
        name = f"{prefix}{key.value}" if isinstance(key.value, str) else ""
        if isinstance(value, yaml.MappingNode):
            collect(value, f"{name}.", found, path, depth + 1)
        elif name:
            found.append(Setting(name, plain(value), key.start_mark.line + 1))


def plain(node: yaml.Node) -> Any:
    """A scalar, or a list of scalars; what lies deeper is only named."""
    if isinstance(node, yaml.SequenceNode):
        return [scalar(inner) if isinstance(inner, yaml.ScalarNode) else "…" for inner in node.value]
    return scalar(node) if isinstance(node, yaml.ScalarNode) else "…"


def scalar(node: yaml.ScalarNode) -> Any:
    """YAML 1.1 takes 1e-6 for text; `Settings` reads numbers from text too. Dates and the like stay text."""
    kinds = {"tag:yaml.org,2002:null": None, "tag:yaml.org,2002:bool": node.value.lower() in ("true", "yes", "on")}
    return kinds.get(node.tag, node.value)


def calls_in(text: str, path: Path) -> list[Setting]:
    """Arguments of GRPOConfig or RLOOConfig and what stands beside it in a Python file: literals, names of literals."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(
            f"{path}, line {line}: not valid Python: {getattr(error, 'msg', error)}.", remedy="Fix the line."
        ) from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path}: nested too deeply; this is not a config.") from None
    names = Names(tree)
    calls = [(node, called(node)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [(node, name) for node, name in calls if name in ("GRPOConfig", "RLOOConfig")]
    if not configs:
        raise ConfigError(
            f"{path}: no call of GRPOConfig or RLOOConfig.", remedy="Name the file that makes it, or a YAML file."
        )
    if {name for _, name in configs} == {"GRPOConfig", "RLOOConfig"}:
        raise ConfigError(
            f"{path}: calls both GRPOConfig and RLOOConfig.", remedy="Name a file that makes one of them."
        )
    found = [Setting(RLOO, True, node.lineno) for node, name in configs[:1] if name == "RLOOConfig"]
    for node, name in calls:
        if name in _TRL_CALLS:
            found += arguments(node, name, names)
        elif name in _ROW_CHANGES and names.is_dataset(node.func):
            number = sum(setting.key.startswith(f"dataset.{name}") for setting in found) + 1
            found.append(Setting(f"dataset.{name}{f' {number}' if number > 1 else ''}", what(node), node.lineno))
        if len(found) > MOST_SETTINGS:
            raise ConfigError(
                f"{path}: more than {MOST_SETTINGS:,} settings; this is not a config.", remedy="Name the config alone."
            )
    return found + system_prompts(tree, names)


def system_prompts(tree: ast.Module, names: Names) -> list[Setting]:
    """What chat turns of the role `system` say, each text once."""
    found: dict[str, Setting] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        turn = {key.value: value for key, value in zip(node.keys, node.values, strict=True) if is_text(key)}
        if "content" in turn and is_text(turn.get("role")) and ast.literal_eval(turn["role"]) == "system":
            text = str(names.value_of(turn["content"]))
            found.setdefault(text, Setting(f"system_prompt{f' {len(found) + 1}' if found else ''}", text, node.lineno))
    return list(found.values())


def is_text(node: ast.expr | None) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def what(call: ast.Call) -> str:
    """The arguments of a call as they are written."""
    try:
        return ", ".join(ast.unparse(node) for node in (*call.args, *call.keywords)) or "()"
    except ValueError:
        return "…"


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def arguments(node: ast.Call, name: str, names: Names) -> Iterator[Setting]:
    prefix = _TRL_CALLS[name]
    for place, value in zip(_POSITIONS.get(name, ()), node.args, strict=False):
        read = names.items_of if place == "reward_funcs" else names.value_of
        yield Setting(prefix + place, read(value), value.lineno)
    for keyword in node.keywords:
        if keyword.arg is not None:
            read = names.items_of if keyword.arg == "reward_funcs" else names.value_of
            yield Setting(prefix + keyword.arg, read(keyword.value), keyword.value.lineno)


class Names:
    """What the names of a Python file are bound to. Each is worked out once, however many arguments use it."""

    def __init__(self, tree: ast.Module) -> None:
        self.assigned: dict[str, list[ast.expr]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned[target.id].append(node.value)
        self.bound = {name: values[-1] for name, values in self.assigned.items()}
        self.numbers = {
            name: str(node.value)
            for name, node in self.bound.items()
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= LARGEST
        }
        self.known: dict[str, Any] = {}
        self.parameters = {
            argument.arg for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for argument in node.args.args
        }

    def is_dataset(self, node: ast.expr, *, on_the_way: frozenset[str] = frozenset()) -> bool:
        """Whether this is a data set or made from one: back through its methods and names to where it was loaded.

        A parameter of a function may be one, and is taken for it.
        """
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            if isinstance(node, ast.Call):
                if called(node) in _LOADERS:
                    return True
                node = node.func
            else:
                node = node.value
        if not isinstance(node, ast.Name) or node.id in on_the_way or len(on_the_way) > MOST_NAMES:
            return False
        before = on_the_way | {node.id}
        values = self.assigned.get(node.id, [])[:MOST_NAMES]
        return node.id in self.parameters or any(self.is_dataset(value, on_the_way=before) for value in values)

    def items_of(self, node: ast.expr) -> Any:
        """The elements of a list, each as its value or its source; of anything else the value."""
        bound = self.bound.get(node.id, node) if isinstance(node, ast.Name) else node
        if not isinstance(bound, ast.List | ast.Tuple):
            return self.value_of(node)
        return [str(self.value_of(inner)) for inner in bound.elts]

    def value_of(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Name) or node.id not in self.bound:
            return literal(node, self.numbers)
        if node.id not in self.known:
            self.known[node.id] = literal(self.bound[node.id], self.numbers)
        return self.known[node.id]


def literal(node: ast.expr, numbers: dict[str, str]) -> Any:
    """The value of a literal, or of plain arithmetic with names of whole numbers; of anything else, its source."""
    try:
        value = ast.literal_eval(node)
        str(value)  # Python refuses to write out a whole number of thousands of digits
        return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        source = ast.unparse(node)
    except ValueError:
        return "…"
    result = arithmetic(source, numbers) if "/" not in source else None  # Python's / is not the shell's
    return source if result is None else result
