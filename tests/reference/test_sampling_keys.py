"""Which groups a step trains on, key by key: a config through `sample_step`, a virtual engine, a set known by heart.

Of the problems 0, 1, 2, … the even ones come out mixed and the odd ones wrong throughout, so that the choice can be
written down: dynamic sampling takes 0, 2, 4, 6.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from side_by_side import RECIPE

from dapo.config import load_recipe
from dapo.config.schema import Config
from dapo.data.encoded import EncodedSet, OrderedSource
from dapo.data.order import ProblemOrder
from dapo.errors import DataError
from dapo.planning.virtual import EndlessSource, VirtualEngine, VirtualJudge
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import SampledGroups, SamplingState
from dapo.sampling.groups import sample_step
from dapo.sampling.predictive import Posteriors
from dapo.trainer.assemble import selected
from dapo.types import Problem, Task

CARRYING = (
    "preset=dapo-fast", "sampling.predictive=false", "sampling.partial_rollouts=false",
    "sampling.max_staleness_updates=4",
)  # fmt: skip


class EvenIsMixed(VirtualJudge):
    def submit(self, task: Task) -> int:
        problem, _, index = task.response.split("/")
        is_right = int(problem) % 2 == 0 and index == "0"
        return super().submit(replace(task, meta={**task.meta, "pass_rate": float(is_right)}))


class Steps:
    """The steps of a run, as far as its groups go; the engine has room for every group at once."""

    def __init__(self, tmp_path: Path, *overrides: str) -> None:
        (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
        self.config: Config = load_recipe(str(tmp_path / "recipe.toml"), overrides).config
        engine = VirtualEngine(max_concurrent=400, length_of=lambda request: 20 + int(request.key.problem))
        self.collector = Collector(
            engine,
            EvenIsMixed(),
            responses_per_prompt=self.config.sampling.responses_per_prompt,
            max_new_tokens=400,
            seed=0,
            delay_ticks=0,
        )
        self.source, self.state = EndlessSource(lambda _: 0.0), SamplingState()

    def sample(self, version: int = 0) -> SampledGroups:
        self.collector.engine.load_weights(None, version)  # type: ignore[arg-type]
        return sample_step(
            self.collector, self.source, self.config, self.state, version=version, progress=lambda _known, _wanted: None
        )

    def chosen(self, version: int = 0) -> list[int]:
        return [int(group.problem.id) for group in self.sample(version).groups]


@pytest.mark.parametrize(("is_dynamic", "expected"), [("true", [0, 2, 4, 6]), ("false", [0, 1, 2, 3])])
def test_dynamic(tmp_path: Path, is_dynamic: str, expected: list[int]):
    assert Steps(tmp_path, f"sampling.dynamic={is_dynamic}").chosen() == expected


@pytest.mark.parametrize("is_filtered", ["true", "false"])
def test_tokens_of_truncated_responses_are_waste_where_they_are_filtered_whatever_the_penalty(
    tmp_path: Path, is_filtered: str
):
    steps = Steps(tmp_path, f"shaping.overlong_filter={is_filtered}")
    assert steps.config.shaping.overlong_penalty > 0
    steps.collector.engine.length_of = (  # type: ignore[attr-defined]
        lambda request: 1000 if request.key.response_index == 1 else 20
    )
    accounting = steps.sample().accounting
    assert accounting.wasted_tokens["truncated"] == (4 * 400 if is_filtered == "true" else 0)


@pytest.mark.parametrize(("P", "G"), [(4, 4), (6, 3)])
def test_prompts_and_responses(tmp_path: Path, P: int, G: int):
    steps = Steps(tmp_path, f"sampling.prompts_per_step={P}", f"sampling.responses_per_prompt={G}")
    groups = steps.sample().groups
    assert [int(group.problem.id) for group in groups] == list(range(0, 2 * P, 2))
    assert {len(group.completions) for group in groups} == {G}


@pytest.mark.parametrize(("budget", "expected"), [("none", [0, 2, 4, 6]), ("5", [0, 2, 4]), ("4", [0, 2])])
def test_max_prompts_tried_per_step(tmp_path: Path, budget: str, expected: list[int]):
    steps = Steps(tmp_path, f"sampling.max_prompts_tried_per_step={budget}")
    assert steps.chosen() == expected
    assert steps.config.max_prompts_tried_per_step == (40 if budget == "none" else int(budget))


def test_fill_policy(tmp_path: Path):
    """Of five problems three are mixed; the next step begins with the sixth. Of the five after seven, two are."""
    chosen = {}
    for policy in ("train_partial", "skip", "relax"):
        steps = Steps(tmp_path, "sampling.max_prompts_tried_per_step=5", f"sampling.fill_policy={policy}")
        chosen[policy] = [steps.chosen() for _ in range(4 if policy == "skip" else 2)]
    assert chosen["train_partial"] == chosen["relax"] == [[0, 2, 4], [6, 8]]
    assert chosen["skip"] == [[], [0, 2, 4, 6], [], [8, 10, 12, 14]]  # what was held is trained on once
    with pytest.raises(DataError, match=r"sampling\.fill_policy = error"):
        Steps(tmp_path, "sampling.max_prompts_tried_per_step=5", "sampling.fill_policy=error").chosen()


def test_schedule_and_generation_multiple_change_what_is_tried_not_what_is_chosen(tmp_path: Path):
    tried = []
    for keys in (
        ["stream"],
        ["rounds", "sampling.generation_multiple=1"],
        ["rounds", "sampling.generation_multiple=3"],
    ):
        steps = Steps(tmp_path, f"sampling.schedule={keys[0]}", *keys[1:])
        assert steps.chosen() == [0, 2, 4, 6]
        tried.append(steps.collector.n_submitted)
    assert tried[1:] == [8, 12]  # whole batches of 4, or of 3 · 4


def test_without_refilling(tmp_path: Path):
    """Of the problems 0, 1, 2, 3 the mixed ones are trained on, and the next step begins with 4; nobody is told."""
    steps = Steps(tmp_path, "preset=dapo", "sampling.refill=false")
    sampled = steps.sample()
    assert [int(group.problem.id) for group in sampled.groups] == [0, 2]
    assert (sampled.accounting.prompts_tried, sampled.events) == (4, [])
    assert steps.chosen() == [4, 6]


@pytest.mark.parametrize("is_carried", [True, False])
def test_carry_over(tmp_path: Path, is_carried: bool):
    """Surplus groups of the first step are the second's, or are thrown away."""
    keys = CARRYING if is_carried else ("preset=dapo",)
    steps = Steps(tmp_path, *keys, "sampling.responses_per_prompt=2")
    steps.state.acceptance.accepted, steps.state.acceptance.tried = 1.0, 8.0  # far more is begun than is needed
    first = steps.sample()
    assert [int(group.problem.id) for group in first.groups] == [0, 2, 4, 6]
    assert bool(steps.state.carried) == is_carried
    assert (first.accounting.wasted_tokens["surplus"] + first.accounting.wasted_tokens["aborted"] == 0) == is_carried
    assert steps.chosen(1) == [8, 10, 12, 14]


@pytest.mark.parametrize("is_partial", ["true", "false"])
def test_partial_rollouts(tmp_path: Path, is_partial: str):
    steps = Steps(tmp_path, *CARRYING, f"sampling.partial_rollouts={is_partial}")
    steps.chosen()
    assert bool(steps.state.pending) == (is_partial == "true")


@pytest.mark.parametrize(("is_finished", "epochs"), [("true", 1), ("true", 2), ("false", 1)])
def test_finish_overtaken(tmp_path: Path, is_finished: str, epochs: int):
    """Groups get longer from one to the next, so that later ones are left behind: once at most, or time and again.

    A step has four updates, as many as a group may be old, in one epoch or in two.
    """
    steps = Steps(
        tmp_path, *CARRYING, "sampling.partial_rollouts=true", f"sampling.finish_overtaken={is_finished}",
        f"train.updates_per_step={4 // epochs}", f"train.epochs_per_step={epochs}",
        "sampling.max_prompts_tried_per_step=60",
    )  # fmt: skip
    seen = 0
    for step in range(3):
        steps.chosen(step)
        seen = max([seen, *(group.overtaken for group in steps.state.pending)])
    assert seen == 1 if is_finished == "true" else seen > 1


@pytest.mark.parametrize(("bound", "is_used"), [(4, False), (5, True)])
def test_max_staleness_updates(tmp_path: Path, bound: int, is_used: bool):
    steps = Steps(tmp_path, *CARRYING, f"sampling.max_staleness_updates={bound}")
    steps.state.acceptance.accepted, steps.state.acceptance.tried = 1.0, 8.0
    steps.chosen(0)
    carried = [int(group.problem.id) for group in steps.state.carried]
    assert carried
    assert set(carried).isdisjoint(steps.chosen(5)) != is_used


@pytest.mark.parametrize(("is_predictive", "retire_above"), [("true", "none"), ("true", "0.8"), ("false", "0.8")])
def test_predictive(tmp_path: Path, is_predictive: str, retire_above: str):
    """Problems that were never right in a hundred responses are mostly passed over, solved ones retired beside that."""
    keys = CARRYING[0], "sampling.max_staleness_updates=4", f"sampling.predictive={is_predictive}"
    steps = Steps(tmp_path, *keys, f"sampling.retire_above={retire_above}")
    problems = [Problem(str(i), "", "") for i in range(40)]
    solved = {str(i): (20.0, 0.0) for i in (1, 3, 5, 7)}
    posteriors = Posteriors(counts={str(i): (0.0, 100.0) for i in range(0, 40, 2)} | solved)
    ordered = OrderedSource(EncodedSet("set", "", tuple(problems), ((1,),) * 40), ProblemOrder(40, seed=0))
    source = selected(steps.config, ordered, posteriors)
    source.start_step()
    came = [int(given[0].id) for _ in range(10) if (given := source.next()) is not None]
    hopeless = sum(i % 2 == 0 for i in came)
    assert hopeless <= 2 if is_predictive == "true" else hopeless >= 4
    if retire_above != "none":
        assert not {1, 3, 5, 7} & {*came}
