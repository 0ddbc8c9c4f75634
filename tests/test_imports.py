"""The one structural rule: imports point downwards, and the heavy libraries stay where they belong."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "dapo"

# Top to bottom. Areas on one line do not import each other.
LAYERS = [
    ["__init__", "__main__"],
    ["cli"],
    ["bench"],
    ["ablation", "quickstart", "release"],
    ["trainer"],
    ["learner"],
    ["planning", "evaluation"],
    ["sampling"],
    ["rollout", "checkpoints"],
    ["models", "distributed"],
    ["report", "data", "environments"],
    ["rewards", "tracking", "peers"],
    ["config"],
    ["files", "parquet_size", "chat_client", "console"],
    ["waiting"],
    ["types", "errors", "commands", "processes"],
    ["algorithms"],
]
RANK = {area: -depth for depth, layer in enumerate(LAYERS) for area in layer}
MAY_IMPORT_VLLM_OR_RAY = {"rollout/vllm/core.py", "bench/vllm_peer.py", "distributed/ray_workers.py"}


def sources() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def area(path: Path) -> str:
    first = path.relative_to(SRC).parts[0]
    return first.removesuffix(".py")


@functools.cache
def modules(path: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imports(path: Path) -> set[str]:
    """Areas of ours that a file imports; `from dapo import __version__` is none."""
    second = {name.split(".")[1] for name in modules(path) if name.startswith("dapo.")}
    return second & RANK.keys()


def test_every_area_has_its_place():
    assert {area(path) for path in sources()} <= RANK.keys()


def test_imports_point_downwards():
    wrong = [
        f"{path.relative_to(SRC)}: {area(path)} must not import {other}"
        for path in sources()
        for other in imports(path) - {area(path)}
        if RANK[other] >= RANK[area(path)]
    ]
    assert not wrong, "\n".join(wrong)


def rooms() -> dict[Path, list[Path]]:
    folders: dict[Path, list[Path]] = {}
    for path in sources():
        folders.setdefault(path.parent, []).append(path)
    return folders


def test_a_room_holds_at_most_twenty_files_and_says_what_it_is_for():
    assert {str(room.relative_to(SRC)): len(files) for room, files in rooms().items() if len(files) > 20} == {}
    for room in rooms():
        purpose = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
        assert purpose, f"{room.relative_to(SRC)}/__init__.py: one line that says what the room is for"


def test_no_file_imports_itself_through_others():
    """Also not inside functions or for types only: two files that need each other are one, or lack a third."""
    names = {".".join(("dapo", *path.relative_to(SRC).with_suffix("").parts)): path for path in sources()}
    graph = {
        name: {found for used in modules(path) for found in (used, used.rpartition(".")[0]) if found in names} - {name}
        for name, path in names.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_algorithms_import_torch_and_nothing_of_ours():
    ours = {
        name
        for path in (SRC / "algorithms").glob("*.py")
        for name in modules(path)
        if name.startswith("dapo.") and not name.startswith("dapo.algorithms")
    }
    assert not ours


def test_vllm_and_ray_are_imported_in_named_files_only():
    wrong = [
        str(path.relative_to(SRC))
        for path in sources()
        if {name.split(".")[0] for name in modules(path)} & {"vllm", "ray"}
        and path.relative_to(SRC).as_posix() not in MAY_IMPORT_VLLM_OR_RAY
    ]
    assert not wrong


def at_once(path: Path) -> set[str]:
    """Dotted names of what a file imports as soon as it is imported itself: not in functions, nor for types only."""
    found: set[str] = set()
    left: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, (ast.If, ast.Try)) and "TYPE_CHECKING" not in ast.dump(node):
            left += ast.iter_child_nodes(node)
    return found


def test_kernels_of_triton_are_imported_where_they_run_only():
    """Triton has no wheels for many platforms, and the CPU build of torch comes without it."""
    names = {".".join(("dapo", *path.relative_to(SRC).with_suffix("").parts)): at_once(path) for path in sources()}
    kernels = {name for name, found in names.items() if "triton" in found}
    assert "dapo.rollout.local.kernels" in kernels
    assert {name: found & kernels for name, found in names.items() if found & kernels} == {}


@pytest.mark.parametrize("module", ["dapo", "dapo.config", "dapo.report", "dapo.cli.main", "dapo.types"])
def test_imports_without_torch(module: str):
    if (
        module != "dapo"
        and not (SRC / module.split(".")[1]).exists()
        and not (SRC / f"{module.split('.')[1]}.py").exists()
    ):
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_names_that_need_no_torch_come_without_it():
    code = (
        "import sys, dapo; dapo.Problem, dapo.Score, dapo.Observer, dapo.load_recipe; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_of_the_package_is_there():
    import dapo

    assert all(getattr(dapo, name) is not None for name in dapo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dapo.nonsense  # noqa: B018
