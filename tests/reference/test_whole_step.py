"""A whole step beside the reference trainer: every preset, every key that reaches its mathematics, a whole run.

Rewards, advantages, losses, gradients and new weights of policy and critic agree within 1e-9 of the largest number of
their kind; steps reach 1e-12, a run 2e-12. The library's norms work in float32 inside a model of
float64, so that a difference in the last digit could become one in the eighth; here they stay in float64, in both
trainers.
"""

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from cases import ALL_TERMS, CASES, DAPO, ELSEWHERE, LEFT_OUT, NOT_IN_A_STEP, PRESETS, Case
from side_by_side import (
    STEPS,
    TOLERANCE,
    episodes_of,
    flat,
    groups_of,
    keys_of,
    make_models,
    our_weights,
    reference_trainer,
    run_both,
    settings,
    toml,
    weight_gaps,
    weights_of,
)
from torch import Tensor
from torch.testing import assert_close
from toy import recipe

from dapo.config.keys import known_keys
from dapo.config.load import preset_names, read_preset
from dapo.config.schema import Config
from dapo.files import read_lines
from dapo.learner import batch as batch_module
from dapo.models.packing import Packed
from dapo.trainer import loop as loop_module
from dapo.trainer import pretrain_value as pretrain_module
from dapo.trainer.loop import train
from dapo.trainer.run import Run
from dapo.trainer.start import start_run
from dapo.types import Group, StopReason
from exact_norms import exact_norms

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def in_float64() -> Iterator[None]:
    with exact_norms():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def check(folder: Path, overrides: dict[str, Any]) -> Tensor:
    """Both trainers agree; returns all our new weights."""
    gaps, weights = both(folder, settings(folder, overrides).model_dump_json())
    refuse(gaps, overrides)
    return torch.cat([weight.flatten() for weight in weights.values()])


@cache  # cases that share a base need it once
def both(folder: Path, config: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    return run_both(folder, Config.model_validate_json(config))


def refuse(gaps: dict[str, float], of: object) -> None:
    wrong = {name: gap for name, gap in gaps.items() if not gap < TOLERANCE}
    assert not wrong, f"{of}: {wrong}"


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_does_what_the_papers_say(folder: Path, preset: str):
    fields, found, expected = known_keys(), dict(flat(read_preset(preset))), PRESETS[preset]
    for key in found.keys() | expected.keys():
        value = found.get(key, fields[key].default)
        assert (None if value == "none" and key not in WORD_NONE else value) == expected.get(
            key, fields[key].default
        ), key
    check(folder, {"preset": preset} | NEEDED.get(preset, {}))


NEEDED: dict[str, dict[str, Any]] = {"scalerl": {"sampling.responses_per_prompt": 5}}  # a pass rate of 0.9 is reached
WORD_NONE = {"algorithm.group.std", "algorithm.advantage"}  # here the word is a value of its own


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_value_of_a_key_does_what_the_papers_say(folder: Path, case: Case):
    results = []
    for value in case.values:
        asked = value.format(folder=folder) if isinstance(value, str) else value
        results.append((value, check(folder, case.base | {case.key: asked})))
    for (one, learned), (other, learned_too) in combinations(results, 2):
        if learned.shape != learned_too.shape:
            continue  # with and without a critic
        difference = float((learned - learned_too).abs().max())
        if case.is_seen:
            assert difference > 1e-7, f"{case.key}: {one} and {other} do the same"
        else:
            assert difference < TOLERANCE, f"{case.key}: {one} and {other} differ by {difference}"


@pytest.mark.parametrize("base", [DAPO, ALL_TERMS], ids=["dapo", "all terms"])
def test_rows_that_share_their_prompt_learn_the_same(
    folder: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """As a run packs them in 32 and 16 bits; in float64 it does not by itself."""
    pack, is_shared = batch_module.pack, []

    def pack_shared(prompts: Any, responses: Any, device: Any, own: Any, **_: Any) -> Packed:
        packed = pack(prompts, responses, device, own=own, sharing_saves=0)
        is_shared.append(packed.n_tokens < sum(map(len, prompts)) + sum(map(len, responses)))
        return packed

    monkeypatch.setattr(batch_module, "pack", pack_shared)
    for made in (groups_of, episodes_of):
        refuse(run_both(folder, settings(folder, base), made)[0], base)
    assert any(is_shared)


@pytest.mark.parametrize("preset", ["dapo", "gspo", "ppo", "vapo", "reinforce++"])
def test_an_episode_learns_from_what_the_model_said_alone(folder: Path, preset: str):
    """Losses, their means, ratios of a sequence and GAE are over its own tokens; eq. 13 counts all of them."""
    config = settings(folder, {"preset": preset, "shaping.overlong_penalty": 0.7})
    gaps, learned = run_both(folder, config, episodes_of)
    refuse(gaps, preset)
    _, of_all = run_both(folder, config)
    assert any(not torch.equal(one, other) for one, other in zip(learned.values(), of_all.values(), strict=True))


@pytest.fixture
def toy_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, dict[str, list[list[Group]]]]]:
    """Trains on the toy task; returns the run and the groups of its stages, step by step."""
    toy = ROOT / "tests" / "trainer"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(toy), os.environ.get("PYTHONPATH", "")]))
    stages: dict[str, list[list[Group]]] = {"value": [], "policy": []}

    def note(stage: str, module: Any, name: str) -> None:
        sample = getattr(module, name)

        def noted(*parts: Any, **how: Any) -> Any:
            sampled = sample(*parts, **how)
            stages[stage].append(list(sampled.groups))
            return sampled

        monkeypatch.setattr(module, name, noted)

    note("value", pretrain_module, "sample_groups")
    note("policy", loop_module, "sample_step")

    def trained(*overrides: str) -> tuple[Run, dict[str, list[list[Group]]]]:
        keys = ("model.kernels=plain", "checkpoint.every_steps=0", "records.every_steps=0", *overrides)
        run = start_run(recipe(tmp_path, *keys), tmp_path / "run")
        try:
            train(run)
        finally:
            run.close()
        return run, stages

    return trained


def test_a_run_samples_and_learns_as_its_config_says(toy_run: Callable[..., Any], tmp_path: Path):
    run, stages = toy_run("preset=dapo", "sampling.temperature=0.8", "train.steps=2", "limits.max_response_tokens=10")
    keys = keys_of(run.config)
    reference = reference_trainer(tmp_path / "model", keys)
    start = weights_of(reference.policy, None)
    for number, groups in enumerate(stages["policy"], start=1):
        assert len(groups) == 4
        for group in groups:
            assert 0 < group.n_correct < len(group.completions) == 4  # eq. 11
            assert max(len(completion.tokens) for completion in group.completions) <= 10
            versions = {int(version) for completion in group.completions for version in completion.version}
            assert versions == {2 * (number - 1)}  # updates so far: the engine was told of the newest weights
        step = reference.step(groups, number)
        for row in step.rows:  # drawn from the newest weights, at the temperature that training scores at
            assert_close(row.logp_engine, row.logp_old, rtol=0, atol=1e-5)
    refuse(weight_gaps(start, our_weights(run.learner), weights_of(reference.policy, None)), "a run")
    assert run.learner.updates == 4


def aborted(group: Group) -> Group:
    return replace(group, completions=tuple(replace(c, stop_reason=StopReason.ABORTED) for c in group.completions))


@pytest.mark.parametrize("n_aborted", [0, 2])
def test_value_pretraining_fits_the_critic_to_what_came_out(
    toy_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_aborted: int
):
    """The fifth step has 4 new problems of 40, and 5 again; the engine may give up every response of the first ones."""
    sample, sampled = pretrain_module.sample_groups, []

    def give_up(*parts: Any, **how: Any) -> Any:
        sampled.append(sample(*parts, **how))
        if len(sampled) <= n_aborted:
            sampled[-1].groups[:] = [aborted(group) for group in sampled[-1].groups]
        return sampled[-1]

    monkeypatch.setattr(pretrain_module, "sample_groups", give_up)
    run, stages = toy_run(
        "preset=vapo", "algorithm.critic.pretrain_responses=45", "algorithm.critic.lr=7e-3", "train.steps=1",
        "train.seed=3", "sampling.prompts_per_step=3", "sampling.responses_per_prompt=3", "train.warmup_steps=3",
        "algorithm.critic.pretrain_epochs=3", "algorithm.critic.value_clip=0.05",
        "shaping.overlong_filter=true", "shaping.overlong_penalty=1.0",
        "algorithm.gae.lam_critic=0.5", "algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward",
        "train.epochs_per_step=2",
    )  # fmt: skip
    reference = reference_trainer(tmp_path / "model", keys_of(run.config))
    start = weights_of(reference.policy, reference.critic)
    stages["value"] = [step.groups for step in sampled]
    assert [[len(group.completions) for group in groups] for groups in stages["value"]] == [[1] * 9] * 5
    explained, losses = zip(
        *(reference.pretrain(groups, n) for n, groups in enumerate(stages["value"], 1)), strict=True
    )
    assert [known.explained.variance for known in run.held_out_fits] == pytest.approx(explained, rel=1e-9, abs=1e-9)
    for metric, expected in (("loss", losses), ("explained_variance", (*[None] * n_aborted, *explained[n_aborted:]))):
        told = [line.get(f"critic/{metric}") for line in read_lines(run.folder / "value.jsonl")]
        assert [known is None for known in told] == [known is None for known in expected]
        assert list(filter(None, told)) == pytest.approx(list(filter(None, expected)), rel=1e-9)
    assert [known.problems for known in run.held_out_fits] == [0] * n_aborted + [9] * (4 - n_aborted) + [4]
    for number, groups in enumerate(stages["policy"], start=1):
        reference.step(groups, number)
    refuse(weight_gaps(start, our_weights(run.learner), weights_of(reference.policy, reference.critic)), "a run")


def test_the_groups_have_everything_that_a_key_could_look_at():
    """A reference that agrees on nothing to see proves nothing."""
    for number in STEPS:
        groups = groups_of(number, 4, 4)
        completions = [completion for group in groups for completion in group.completions]
        assert {completion.stop_reason for completion in completions} == set(StopReason)
        assert any(len(c.tokens) == 0 for c in completions)
        assert any(len(c.tokens) > 0 for c in completions if c.stop_reason is StopReason.ABORTED)
        assert sum(group.is_mixed for group in groups) == 3
        assert any(group.is_graded for group in groups)
        assert len({group.prompt_tokens for group in groups}) < len(groups)


def test_every_key_has_a_case():
    """A new key comes with its case, with a test that shows what it does, or with the reason why it needs none."""
    listed = [{case.key for case in CASES}, set(ELSEWHERE), set(NOT_IN_A_STEP)]
    missing = known_keys().keys() - set.union(*listed)
    assert not missing, f"tests/reference/cases.py has no case for {sorted(missing)}"
    stale = set.union(*listed) - known_keys().keys()
    assert not stale, f"no such keys: {sorted(stale)}"
    twice = [sorted(a & b) for a, b in combinations(listed, 2) if a & b]
    assert not twice


@pytest.mark.parametrize("key", sorted({case.key for case in CASES}))
def test_every_value_of_a_choice_has_a_case(key: str):
    tried = {
        toml(value) if isinstance(value, dict) else value for case in CASES if case.key == key for value in case.values
    }
    needed = choices(known_keys()[key].annotation)
    assert needed - {value for name, value in LEFT_OUT if name == key} <= tried
    assert len(tried) > 1


def test_what_is_left_out_is_a_value_of_its_key_that_no_case_has():
    for key, value in LEFT_OUT:
        assert value in choices(known_keys()[key].annotation)
        assert all(value not in case.values for case in CASES if case.key == key)


def choices(kind: Any) -> set[Any]:
    """The values that a key can be counted on: words, true and false, none."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return set[Any]().union(*(choices(part) for part in get_args(kind)))
    return {bool: {True, False}, NoneType: {None}}.get(kind, set())


@pytest.mark.parametrize("name", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_are_pointed_to_are_there(name: str):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
