"""Mutation testing of what decides a training step: mutmut, with operators of our own and a faster fork server.

    python tools/mutants/run.py                  all mutants; started again, it goes on where it was stopped
    python tools/mutants/run.py --sample 150     a random sample
    python tools/mutants/run.py 'dapo.learner.batch.*'     some, by name
    python tools/mutants/run.py --survivors      again those that survived, after new tests

Which modules and tests: `[tool.mutmut]` in pyproject.toml. Each survivor stands in survivors.md with the reason. One
that does not, a line there whose mutant is killed, or less than 90 % killed: then a whole run fails.
"""

import argparse
import ast
import fnmatch
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import libcst as cst
import mutmut.__main__ as mutmut_main
from mutmut.mutation import file_mutation, mutators
from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import change_cwd
from mutmut.utils.format_utils import orig_function_and_class_names_from_key
from mutmut.workers.isolation import ForkServerRunner
from operators import (
    drop_added,
    drop_term,
    flip_sign,
    ignored_keys,
    is_left_alone,
    leave_out_argument,
    one_string,
    swap_keywords,
)

SURVIVORS = Path(__file__).with_name("survivors.md")
WORK = Path("mutants")
WANTED_SHARE = 0.9
CPU_SECONDS, CPU_FACTOR = 5, 10  # of a test's own time: beyond this it hangs, and the mutant is killed
CONTROL = "dapo.control.x_control__mutmut_0"  # no mutant has this name: the code as it is
MOST_CPU_SECONDS = 60  # of tests for one mutant: not noticed by then, it counts as a survivor
LISTED_CPU_SECONDS = 15  # of tests for one that survivors.md has: it is expected to survive
WORD = r"[a-z]{3,}"
OF_RANKS = {"world", "reduce", "dummy", "gather", "gathered", "across", "own"}  # tests call it ranks
ALLOWED_DECORATORS = {"property", "classmethod", "staticmethod", "torch.no_grad()"}
# Saving, loading and what memory they take: no step's numbers come from these.
NOT_TRAINING = {
    "tensors", "load", "parts", "on_host", "whole", "part_of_key", "part_of", "load_parts", "assign", "bytes_to_come",
}  # fmt: skip
# mutmut's own that ours replace, or that only make a line crash: a value becomes None, a positional argument goes.
REPLACED = {"operator_string", "operator_arg_removal", "operator_assignment"}


def operators() -> list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]]:
    ours = [
        (cst.SimpleString, one_string),
        (cst.Call, leave_out_argument),
        (cst.Call, swap_keywords),
        (cst.BinaryOperation, drop_term),
        (cst.AugAssign, drop_added),
        (cst.BinaryOperation, flip_sign),
        (cst.Attribute, ignored_keys(defaults())),
    ]
    return [kept for kept in mutators.mutation_operators if kept[1].__name__ not in REPLACED] + ours


@cache
def defaults() -> dict[str, str]:
    """Every key of the schema that has a default which can be written down."""
    from dapo.config.keys import known_keys

    made = {}
    for key, field in known_keys().items():
        text = repr(field.default)
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError):
            continue
        made[key] = text
    for name in [name for name in sys.modules if name.partition(".")[0] == "dapo"]:
        del sys.modules[name]  # tests import the mutants
    return made


# ---------------------------------------------------------------- making mutants


class Visitor(file_mutation.MutationVisitor):
    """mutmut's, with our operators, in what decides numbers; also in properties and under torch.no_grad()."""

    def __init__(self, _: Any, *more: Any) -> None:
        super().__init__(operators(), *more)

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if is_left_alone(node):
            return True
        if isinstance(node, cst.FunctionDef):
            names = {cst.Module([]).code_for_node(d.decorator) for d in node.decorators}
            return node.name.value in NOT_TRAINING or not names <= ALLOWED_DECORATORS
        return super()._skip_node_and_children(node)

    def _create_mutations(self, node: cst.CSTNode) -> None:
        function = self.get_metadata(file_mutation.OuterFunctionProvider, node, None)
        for kind, operator in self._operators:
            if isinstance(node, kind):
                for mutated in operator(node):
                    mutation = file_mutation.Mutation(node, mutated, function)
                    mutation.operator = operator.__name__
                    self.mutations.append(mutation)


OPERATOR_OF: dict[str, str] = {}  # mutant -> operator, of the file at hand


def arrange(function: cst.FunctionDef, mutations: Iterable[Any], class_name: str | None) -> Any:
    """mutmut's trampoline, each mutant once; a property's copies are plain functions."""
    code, seen, once = cst.Module([]).code_for_node, {cst.Module([]).code_for_node(function)}, []
    for mutation in mutations:
        text = code(file_mutation.deep_replace(function, mutation.original_node, mutation.mutated_node))
        if text not in seen:
            seen.add(text)
            once.append(mutation)
    before, nodes, after, names = ARRANGE(function, once, class_name)
    if any(code(decorator.decorator) == "property" for decorator in function.decorators):
        nodes = [nodes[0], *(copy.with_changes(decorators=[]) for copy in nodes[1:])]
    OPERATOR_OF.update({name: mutation.operator for name, mutation in zip(names, once, strict=True)})
    return before, nodes, after, names


def mutate(filename: str, *more: Any) -> Any:
    OPERATOR_OF.clear()
    made = MUTATE(filename, *more)
    (WORK / f"{filename}.operators").write_text(json.dumps(OPERATOR_OF))
    return made


ARRANGE, MUTATE = file_mutation.function_trampoline_arrangement, mutmut_main.mutate_file_contents


# ---------------------------------------------------------------- running tests


class Server(ForkServerRunner):
    """Collects the tests once; each mutant is a fork of that pytest session, so that it pays for its tests alone."""

    session: Any = None
    is_controlled = False

    def startup(self) -> None:
        """A whole run begins with all tests on the code as it is: in a fork too, they must pass."""
        super().startup()
        if self.is_controlled:
            self.submit(CONTROL, list(mutmut_main.state().duration_by_test), 10_000, 0.0)
            if self.wait_for_result().exit_code != 0:
                sys.exit("Tests fail in a fork of the unchanged code: no verdict would mean anything.")

    def collect_stats(self, tests: Iterable[str] | None) -> int:
        code = super().collect_stats(tests)
        if code:
            print("".join((WORK / "tests.log").read_text().splitlines(keepends=True)[-40:]), file=sys.__stdout__)
        return code

    def run_clean_tests(self, tests: Iterable[str]) -> int:  # noqa: ARG002
        return 0  # the run that finds out which test calls what was one

    def _forkserver_main(self, work_fd: int, result_fd: int) -> None:
        import pytest

        serve = super()._forkserver_main

        class Loop:
            def pytest_runtestloop(self, session: pytest.Session) -> bool:
                Server.session = session
                serve(work_fd, result_fd)
                return True

        silence = os.open(os.devnull, os.O_WRONLY)
        for shown in (1, 2):
            os.dup2(silence, shown)
        os.chdir(WORK)
        config = mutmut_main.config()
        arguments = ["--rootdir=.", "-q", "-s", *config.pytest_add_cli_args_test_selection, *config.pytest_add_cli_args]
        pytest.main(arguments, plugins=[Loop()])


class Tests(PytestRunner):
    def warm_up(self) -> None:
        pass  # the session is the warm-up

    def run_stats(self, *, tests: Iterable[str]) -> int:
        import pytest

        pytest.Item._nodeid = pytest.Item.nodeid  # by which name mutmut knows it
        with (WORK / "tests.log").open("w") as log, redirect_stdout(log):
            return super().run_stats(tests=tests)

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        if Server.session is None:
            return super().run_tests(mutant_name=mutant_name, tests=tests)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        folder, words, limit = Path(tempfile.mkdtemp()), set(), math.inf
        if mutant_name not in (None, CONTROL):
            with change_cwd(".."):
                words = words_of(mutant_name)
                is_listed = entry(mutant_name, str(find_mutant(mutant_name).path)) in listed()
            limit = LISTED_CPU_SECONDS if is_listed else MOST_CPU_SECONDS
        try:
            return run_items(Server.session, set(tests), words, limit, folder)
        except BaseException:  # whatever a mutant raises, it was noticed
            return 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def words_of(name: str) -> set[str]:
    """What the changed lines and their function's name speak of."""
    changed = get_diff_for_mutant(name).splitlines()[2:]
    text = " ".join([name.rpartition(".")[2], *(line for line in changed if line[:1] in ("-", "+"))])
    words = set(re.findall(WORD, text))
    return words | {"ranks"} if words & OF_RANKS else words


def run_items(session: Any, chosen: set[str], words: set[str], limit: float, folder: Path) -> int:
    """0 if they all pass, or those that `limit` CPU seconds allow.

    First come tests whose names share words with the change, then those that call few functions.
    """
    state = mutmut_main.state()
    session.config._tmp_path_factory._basetemp = folder
    calls = Counter(test for tests in state.tests_by_mangled_function_name.values() for test in tests)

    def rank(item: Any) -> tuple[int, int, float]:
        shared = words.intersection(re.findall(WORD, item.name))
        return -len(shared), calls[item.nodeid], state.duration_by_test[item.nodeid]

    items = sorted((item for item in session.items if item.nodeid in chosen), key=rank)
    start = time.process_time()
    for item, following in zip(items, [*items[1:], None], strict=True):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS + CPU_FACTOR * state.duration_by_test[item.nodeid])
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
        if time.process_time() - start > limit:
            break
    return 0


class Progress:
    """A line a minute."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def __call__(self, data: dict[str, Any], force_output: bool = False) -> None:
        now = time.monotonic()
        if now - self.last < 60 and not force_output:
            return
        self.last = now
        results = [status_by_exit_code[code] for file in data.values() for code in file.exit_code_by_key.values()]
        done = [result for result in results if result != "not checked"]
        alive = sum(map(is_alive, done))
        print(
            f"{(now - self.start) / 60:4.0f} min: {len(done)} of {len(results)} mutants tested, {alive} survived",
            flush=True,
        )


def is_alive(status: str) -> bool:
    return status in ("survived", "no tests", "suspicious")


# ---------------------------------------------------------------- reporting


def results() -> dict[str, tuple[str, str, str]]:
    """Mutant -> (status, operator, file)."""
    found = {}
    for path in mutmut_main.walk_mutatable_files():
        data = mutmut_main.SourceFileMutationData(path=path)
        data.load()
        operator = json.loads((WORK / f"{path}.operators").read_text())
        for name, code in data.exit_code_by_key.items():
            found[name] = (status_by_exit_code[code], operator[name.rpartition(".")[2]], str(path))
    return found


def entry(name: str, path: str) -> str:
    """How a survivor stands in the list: file, function, and the change as one line each."""
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    gone, came = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    function, class_name = orig_function_and_class_names_from_key(name)
    where = f"{class_name}.{function}" if class_name else function
    return f"{path.removeprefix('src/dapo/')} {where}: `{gone}` → `{came}`"


def listed() -> set[str]:
    """Entries of the list: a line each, followed by an indented line with the reason."""
    return {line.removeprefix("- ") for line in SURVIVORS.read_text().splitlines() if line.startswith("- ")}


def report(found: dict[str, tuple[str, str, str]], is_whole: bool) -> int:
    tested = {name: result for name, result in found.items() if result[0] != "not checked"}
    alive = {name for name, (status, _, _) in tested.items() if is_alive(status)}
    for title, part in (("module", 2), ("operator", 1)):
        every = Counter(result[part] for result in tested.values())
        killed = Counter(result[part] for name, result in tested.items() if name not in alive)
        print(f"\n{title:52} killed  of")
        for key, n in sorted(every.items()):
            name = key.removeprefix("src/dapo/").removeprefix("operator_")
            print(f"{name:52} {killed[key]:6} {n:4}  {killed[key] / n:6.1%}")
    entries = {entry(name, tested[name][2]): name for name in sorted(alive)}
    known = listed()
    new, over = sorted(entries.keys() - known), sorted(known - entries.keys())
    share, spread = 1 - len(alive) / len(tested), interval(len(tested) - len(alive), len(tested))
    if new:
        print(
            "\nSurvivors that are not in survivors.md:\n" + "\n".join(f"- {line}\n  ({entries[line]})" for line in new)
        )
    if over and is_whole:
        print("\nIn survivors.md, but killed or gone:\n" + "\n".join(f"- {line}" for line in over))
    timeouts = sum(status == "timeout" for status, _, _ in tested.values())
    print(f"\n{len(tested) - len(alive)} of {len(tested)} mutants killed, {share:.1%} ({timeouts} by the CPU limit)")
    if not is_whole:
        print(f"a sample of {len(found)}: 95 % interval {spread[0]:.1%} to {spread[1]:.1%}")
        return 0
    return int(share < WANTED_SHARE or bool(new) or bool(over))


def interval(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's."""
    p = hits / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


# ---------------------------------------------------------------- the run


def fingerprint() -> str:
    """Of everything a verdict depends on."""
    files = sorted(path for folder in ("src", "tests", "tools/mutants") for path in Path(folder).rglob("*.py"))
    joined = hashlib.sha256()
    for path in (*files, Path("pyproject.toml")):
        joined.update(path.read_bytes())
    return joined.hexdigest()


def start_anew() -> None:
    """Verdicts of other code are worth nothing; those of this code are kept, so that a run can go on."""
    mark, now = WORK / "fingerprint", fingerprint()
    if WORK.exists() and not (mark.exists() and mark.read_text() == now):
        shutil.rmtree(WORK)
    WORK.mkdir(exist_ok=True)
    mark.write_text(now)


def turn(name: str) -> str:
    """Mutants are tested in an order that is random, and always the same: what is done so far is a sample."""
    return hashlib.sha256(name.encode()).hexdigest()


def install() -> None:
    """Our parts in the places where mutmut looks for its own."""
    defaults()
    mutmut_main.estimated_worst_case_time = turn  # by which it sorts
    file_mutation.MutationVisitor = Visitor
    file_mutation.function_trampoline_arrangement = arrange
    mutmut_main.mutate_file_contents = mutate
    mutmut_main.print_stats = Progress()
    mutmut_main.print_status = lambda *_: None  # a spinner
    mutmut_main.get_mutant_runner = lambda workers=1: Server(workers, Tests, {})
    status_by_exit_code[-signal.SIGPROF] = "timeout"
    status_by_exit_code[255] = "suspicious"  # an error of the tool's own kills nothing


def names_of(patterns: Sequence[str], sample: int | None, again: bool) -> list[str]:
    """Mutants asked for, in their turn."""
    found = results()
    chosen = [name for name in found if not patterns or any(fnmatch.fnmatch(name, text) for text in patterns)]
    if again:
        chosen = [name for name in chosen if is_alive(found[name][0])]
    return sorted(chosen, key=turn)[:sample]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    is_whole = not (asked.names or asked.sample or asked.survivors)
    if is_whole:
        start_anew()
    os.environ["PYTHONPATH"] = str((WORK / "src").absolute())  # for the processes that tests start
    os.environ["OMP_NUM_THREADS"] = "1"
    scratch = tempfile.mkdtemp(prefix="mutants-")
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    install()
    Server.is_controlled = is_whole
    names = []
    try:
        if not is_whole:
            WORK.mkdir(exist_ok=True)
            make_mutants()
            names = names_of(asked.names, asked.sample, asked.survivors)
        before = results() if names else {}
        to_do = [name for name in names if not asked.sample or before[name][0] == "not checked"]
        if is_whole or to_do:
            mutmut_main._run(to_do, asked.processes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{(used.ru_utime + used.ru_stime) / 60:.1f} minutes of CPU time")
    found = results()
    return report(found if is_whole else {name: found[name] for name in names}, is_whole)


def make_mutants() -> None:
    """As mutmut's own run does first; done twice it costs nothing."""
    mutmut_main.set_mutant_under_test("mutant_generation")
    with mutmut_main.CatchOutput():
        mutmut_main.copy_src_dir()
        mutmut_main.create_mutants(2)


if __name__ == "__main__":
    sys.exit(main())
