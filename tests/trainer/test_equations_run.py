"""The equations that docs/equations.md shows are the ones that training runs, and the trainer has none of its own."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import get_args

import pytest
from toy import recipe

from dapo.config.load import preset_names, read_preset
from dapo.config.schema import PolicyLossName
from dapo.models.load import save_policy
from dapo.trainer.loop import train
from dapo.trainer.start import start_run
from tiny_models import tiny_policy

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# What turns groups into a loss. Metrics and 8-bit moments are sums and roundings of their own kind.
MODULES = (
    "learner/batch",
    "learner/forward_passes",
    "learner/critic",
    "learner/step",
    "learner/update",
    "trainer/pretrain_value",
)
FORMULAS = {
    "exp",
    "log",
    "clamp",
    "clip",
    "minimum",
    "maximum",
    "where",
    "mean",
    "std",
    "var",
    "softmax",
    "log_softmax",
}
# Beside the presets as shipped: what none of them switches on.
PARTS = "rewards.parts={short = {function = 'toy:short', weight = 0.5}}"
MORE = {
    "dapo": ("algorithm.loss_aggregation=prompt", "algorithm.clip.dual=10.0", "algorithm.correction.cap=2.0", PARTS),
    "grpo": (PARTS, "rewards.aggregation=normalize_then_sum"),
    "ppo": ("algorithm.kl.coefficient=0.01", "algorithm.kl.place=reward"),
}


def named() -> dict[str, CodeType]:
    """`module.function` of the table's third column -> its code."""
    rows = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|", (ROOT / "docs" / "equations.md").read_text(), re.MULTILINE)
    found = {}
    for cell in rows:
        for module, function in re.findall(r"`(\w+)\.(\w+)", cell):
            home = "dapo.types" if module == "types" else f"dapo.algorithms.{module}"
            code = getattr(getattr(importlib.import_module(home), function, None), "__code__", None)
            if code is not None:
                found[f"{module}.{function}"] = code
    return found


@contextmanager
def calls() -> Iterator[set[CodeType]]:
    """The code of every function called meanwhile."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def test_a_step_of_every_preset_reaches_every_function_of_the_table(tmp_path: Path):
    reached: set[CodeType] = set()
    teacher = tmp_path / "teacher"
    save_policy(tiny_policy(seed=2), teacher)
    runs = [(preset, ()) for preset in preset_names()] + list(MORE.items())
    losses = {read_preset(preset)["algorithm"].get("loss", "clip") for preset in preset_names()}
    runs += [("grpo", (f"algorithm.loss={name}",)) for name in set(get_args(PolicyLossName)) - losses]
    for number, (preset, sets) in enumerate(runs):
        extra = ["algorithm.critic.pretrain_responses=1"] if preset in ("ppo", "vapo") else []
        extra += ["sampling.responses_per_prompt=5"] if preset == "scalerl" else []  # it retires at 0.9
        extra += [f"algorithm.kl.path={teacher}"] if preset == "distillation" else []
        keys = [f"preset={preset}", "train.steps=1", "train.updates_per_step=1", "checkpoint.every_steps=0"]
        run = start_run(recipe(tmp_path, *keys, *extra, *sets), tmp_path / f"run-{number}")
        try:
            with calls() as seen:
                train(run)
        finally:
            run.close()
        reached |= seen
    table = named()
    assert len(table) >= 18
    assert sorted(name for name, code in table.items() if code not in reached) == []


@pytest.mark.parametrize("module", MODULES)
def test_the_trainer_computes_no_formula_of_its_own(module: str):
    source = (ROOT / "src" / "dapo" / f"{module}.py").read_text()
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = [
        f"line {call.lineno}: {call.attr}"
        for call in calls
        if isinstance(call, ast.Attribute) and call.attr in FORMULAS
    ]
    assert found == [], "put it into dapo.algorithms, with its equation, its row in docs/equations.md and its test"
