"""Code that a run's config names is only run where this user started the run on this machine.

A run folder may come from anybody, and its config may name a program or a module. A run that this user starts is
recorded in the user's own state folder, never in the run's: by its real path, an id that is written into the folder,
and a digest of what its config may run. A copied folder or a changed config is untrusted again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config.load import flatten, parse_override, read_toml
from dapo.config.schema import Config
from dapo.config.sources import NAME, TABLES, in_schema
from dapo.data.names import KNOWN, Use
from dapo.data.sources import CALLABLE, file_of
from dapo.errors import ConfigError, DapoError
from dapo.files import replace_file, sha256_of
from dapo.rewards.decision import JUDGE_PREFIX
from dapo.rewards.gym.names import PREFIX as GYM
from dapo.rewards.verifiers import is_function, is_judge, is_own

if TYPE_CHECKING:
    from dapo.distributed.world import World

ID = ".id"
OURS = "dapo.quickstart.task:"  # problem sets that come with the package
MAX_ID_BYTES = 64
# Of the schema: what may name a program or a module, and a module alone.
ENVIRONMENTS = ("data.environment", *(f"{table}.{NAME}.environment" for table in TABLES))
VERIFIERS = ("rewards.verifier", *(f"{table}.{NAME}.verifier" for table in TABLES))
SETS = (*TABLES, *(f"{table}.{NAME}.path" for table in TABLES))
# Names found next to the config of a run, or of the record in an exported bundle.
BESIDE = ("metrics.jsonl", "checkpoints", "rollouts", "MANIFEST.json", ID)


def code_named(keys: Mapping[str, Any]) -> dict[str, str]:
    """Of a flat config, the keys that name a program or a module, and what they name."""
    named = {}
    for key, value in keys.items():
        if (in_schema(key) in VERIFIERS and is_own(str(value))) or (
            in_schema(key) in ENVIRONMENTS and ":" in str(value)
        ):
            named[key] = str(value)
        elif in_schema(key) in SETS:
            sets = value if isinstance(value, list | tuple) else [value]
            if modules := [str(name) for name in sets if is_module(str(name))]:
                named[key] = ", ".join(modules)
    if parts := own_parts_named(keys.get("rewards.parts")):
        named["rewards.parts"] = ", ".join(f"{name}: {what}" for name, what in parts.items())
    return named


def own_parts_named(parts: Any) -> dict[str, str]:
    """The functions and programs of a config's reward parts, whatever the file holds there."""
    named = {}
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        for what in (part.get("function"), part.get("verifier")) if isinstance(part, Mapping) else ():
            if is_own(str(what)):
                named[str(name)] = str(what)
    return named


def is_module(name: str) -> bool:
    """Whether a problem set comes from a function outside this package."""
    is_named = bool(CALLABLE.fullmatch(name)) and name.partition(":")[0] not in KNOWN
    return is_named and not name.startswith((OURS, GYM))


def refuse_strangers(
    folder: Path, keys: Mapping[str, Any], *, is_used: Callable[[str], bool], trust: bool, remedy: str
) -> None:
    """ConfigError where keys of a folder's config that are used name code, and it is no run of this user's here."""
    named = {key: what for key, what in code_named(keys).items() if is_used(key)}
    if trust or not named or is_trusted(folder, keys):
        return
    listed = "; ".join(f"{key} = {what}{aside(what)}" for key, what in named.items())
    raise ConfigError(
        f"{folder}: its config names code that would be run, and it was not started by you on this machine: {listed}.",
        remedy=remedy,
    )


def aside(what: str) -> str:
    """What a name does not say itself."""
    if what == "command":
        return " (programs that its problems name)"
    return " (a server that gets every response and your key)" if is_judge(what) else ""


def not_typed(overrides: Collection[str]) -> Callable[[str], bool]:
    """Whether a key is not the user's own by --set. One that replaces a whole table of sources stands for them all."""
    changes = dict(parse_override(text) for text in overrides)
    own = flatten(changes).keys() | (changes.keys() & set(TABLES))
    return lambda key: key not in own and not any(table in own and key.startswith(f"{table}.") for table in TABLES)


def refuse_strangers_run(folder: Path, overrides: Collection[str], *, trust: bool) -> None:
    """The same for a run that is to be resumed."""
    refuse_strangers(
        folder,
        keys_of(folder / "config.toml"),
        is_used=not_typed(overrides),
        trust=trust,
        remedy="Read it; if you trust who made this run, add --trust.",
    )


def refuse_strangers_recipe(recipe: str, overrides: Collection[str], *, trust: bool) -> None:
    """The same for a run's config that is taken for a recipe. Any other recipe is the user's word."""
    path = Path(recipe)
    if trust or not os.path.isfile(path) or not is_record(path):
        return
    refuse_strangers(
        path.parent,
        keys_of(path),
        is_used=not_typed(overrides),
        trust=False,
        remedy="Read it; if you trust who made it, add --trust. Or name your own for each of these keys with --set.",
    )


def follows_first_rank(config: Config) -> bool:
    """Whether this rank leaves the decision to the first one, which checks before it opens the process group."""
    return config.cluster.backend != "none" and os.environ.get("RANK", "0") != "0"


def agree_on_code(world: World, config: Config) -> None:
    """Every rank runs what the first one has decided on: only its machine need know the run."""
    own = code_named(flatten(config.model_dump(mode="json")))
    if (first := world.from_first(own)) != own:
        raise ConfigError(
            f"rank {world.rank}: its config names other code than that of the first rank: {own}, there {first}.",
            remedy="Start all ranks with the same recipe or run folder, and the same --set.",
        )


def is_record(path: Path) -> bool:
    """Whether a run wrote this config; otherwise it is a recipe of the user's."""
    return path.name == "config.toml" or any(os.path.lexists(path.parent / name) for name in BESIDE)


def keys_of(path: Path) -> dict[str, Any]:
    return flatten(read_toml(path))


# ------------------------------------------------------------------ the record


def trust_run(folder: Path, config: Config) -> None:
    """Record that this user has started, or trusts, this run. A run that names no code needs no record."""
    keys = flatten(config.model_dump(mode="json"))
    home = state_folder()
    if not code_named(keys) or home is None:
        return
    if id_of(folder) is None:
        replace_file(folder / ID, secrets.token_hex(16) + "\n")
    with suppress(OSError, DapoError):  # a home that cannot be written: the run needs --trust on resume
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(record_file(home, folder), json.dumps(record_of(folder, keys), indent=1) + "\n")


def is_trusted(folder: Path, keys: Mapping[str, Any]) -> bool:
    home = state_folder()
    if home is None or id_of(folder) is None:
        return False
    try:
        known = json.loads(record_file(home, folder).read_text(encoding="utf-8"))
        files = dict(known.pop("files", {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    now = record_of(folder, keys)
    return bool(now.pop("files").items() <= files.items() and known == now)


def record_of(folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Which run it is, and what it may run. Problem files that name programs are known by their content."""
    named = code_named(keys)
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    runs_named = {*named.values(), *own_parts_named(keys.get("rewards.parts")).values()}
    files = problem_files(keys) if "command" in runs_named else {}
    for name in sorted(runs_named):
        files |= file_named(name)
    return {"folder": os.path.realpath(folder), "id": id_of(folder), "code": digest, "files": files}


def problem_files(keys: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the problem sets that are files, by their names in the config. One that is not there runs nothing."""
    uses: tuple[tuple[str, Use], ...] = (("data.train", "train"), ("data.eval", "eval"))
    found = {name: file_of(name, use=use) for table, use in uses for name in sets_of(keys, table)}
    return {name: sha256_of(path) for name, path in found.items() if path is not None}


def sets_of(keys: Mapping[str, Any], table: str) -> list[str]:
    """What data.train or data.eval names, in whichever shape; a source without a path is named by its name."""
    value = keys.get(table, ())
    plain = value if isinstance(value, list | tuple) else [value]
    sources = dict.fromkeys(key.split(".")[2] for key in keys if key.startswith(f"{table}."))
    paths = [keys.get(f"{table}.{name}.path") for name in sources]
    own = [name if path in (None, "none") else path for name, path in zip(sources, paths, strict=True)]
    return [name for name in (*plain, *own) if isinstance(name, str)]


def file_named(name: str) -> dict[str, str]:
    """The digest of a judge's file, which says what server gets the responses, or of the Python file of a function."""
    if is_judge(name):
        path = Path(name.removeprefix(JUDGE_PREFIX)).expanduser()
    elif is_function(name) and name.rpartition(":")[0].endswith(".py"):
        path = Path(name.rpartition(":")[0])
    else:
        return {}
    return {name: sha256_of(path)} if path.is_file() else {}


def record_file(home: Path, folder: Path) -> Path:
    """One file per path: a new run in the same folder replaces the record of the old one."""
    return home / f"{hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]}.json"


def id_of(folder: Path) -> str | None:
    path = folder / ID
    try:
        if path.is_symlink():
            return None
        with path.open("rb") as file:
            return file.read(MAX_ID_BYTES).decode("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def state_folder() -> Path | None:
    """Of this user, as the XDG base directories have it; None where there is no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "dapo" / "runs"
    home = os.path.expanduser("~")
    return Path(home) / ".local" / "state" / "dapo" / "runs" if os.path.isabs(home) else None
