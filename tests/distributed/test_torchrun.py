"""Runs on 2 and 4 ranks (gloo, loopback) beside the same runs in one process: same choice, tokens and weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from launch import torchrun
from ranks import one_process
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dapo.checkpoints.save import in_order, name_of
from dapo.checkpoints.sharded import has_slices, read_slices
from dapo.release.export import export_run

pytestmark = pytest.mark.distributed

# Nothing divides: 5 groups of 3 responses in 2 updates, 7 slots and micro-batches of a few rows, on 2 or 4 ranks.
UNEVEN = [
    "train.steps=3", "sampling.prompts_per_step=5", "sampling.responses_per_prompt=3", "train.updates_per_step=2",
    "rollout.max_concurrent_sequences=7", "train.tokens_per_microbatch=40",
]  # fmt: skip
EVALUATED = [
    "data.eval=['toy:problems']", "eval.every_steps=3", "eval.k=2", "checkpoint.keep=1", "checkpoint.keep_best=true",
]  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "dapo": {"overrides": [*UNEVEN, *EVALUATED]},
    "tied": {"overrides": [*UNEVEN, "train.steps=2"], "family": "llama-tied"},
    "fast": {"overrides": [*UNEVEN, "preset=dapo-fast"]},
    "grpo": {"overrides": [*UNEVEN, "preset=grpo", "train.steps=2"]},  # with a reference model
    # With a critic, whose first head is fitted to outcomes that vary.
    "ppo": {"overrides": [*UNEVEN, "preset=ppo", "train.steps=2", "train.seed=1"]},
    "few": {"overrides": ["train.steps=2", "sampling.prompts_per_step=1", "sampling.responses_per_prompt=2",
                          "train.updates_per_step=1"]},  # fewer rows than ranks
    # Two sources with a verifier each, and a second part of the reward, normalised over the step's responses.
    "mixture": {"overrides": [
        *UNEVEN, "train.steps=2", "rewards.aggregation=normalize_then_sum",
        "data.train={many={path='toy:problems', weight=2}, exact={path='toy:problems', verifier='exact'}}",
        "rewards.parts={short={function='toy:short', weight=0.5}}",
    ]},
    # Episodes of several turns: an environment lives on one rank, and what it says is known on all.
    "episodes": {"overrides": [
        *UNEVEN, "train.steps=2", "preset=dapo-fast", "data.environment=talking:Talker", "limits.max_turns=4",
        "limits.max_response_tokens=32",
    ]},
    "float32": {"overrides": [*UNEVEN, "train.lr=1e-4"], "dtype": "float32"},
    # Sharded, its masters are float32 and its layers gathered with 16 bits: the plain bfloat16 path in another order.
    "bfloat16": {"overrides": [*UNEVEN, "train.steps=1"], "dtype": "bfloat16"},
    "lora": {"overrides": [*UNEVEN, "train.steps=2", "model.lora.rank=4"]},
    "lora-tied": {"overrides": [*UNEVEN, "train.steps=2", "model.lora.rank=4"], "family": "llama-tied"},
}  # fmt: skip
# Each of them on so many ranks, sharded or not. A start costs seconds, so not everything runs everywhere.
LAYOUTS = {
    "dapo": ["2-none", "2-full", "4-none", "4-full"],
    "tied": ["2-none", "2-full"],
    "fast": ["2-full", "4-none"],
    "grpo": ["2-full", "4-none"],
    "ppo": ["2-none", "4-full"],
    "few": ["2-none", "4-full"],
    "mixture": ["2-full", "4-none"],
    "episodes": ["2-none", "4-full"],
    "float32": ["2-none", "4-full"],
    "bfloat16": ["2-none", "2-full"],
    "lora": ["2-none", "2-full"],
    "lora-tied": ["2-none", "2-full"],
}
EVERYWHERE = [(name, layout) for name in PLANS for layout in LAYOUTS[name]]
EXACT = [case for case in EVERYWHERE if case[0] not in ("float32", "bfloat16")]
HALF = 2  # steps before the runs that are resumed on fewer ranks


def plans(n: int) -> list[dict[str, Any]]:
    return [
        {
            **PLANS[name],
            "name": f"{name}-{layout}",
            "overrides": [*PLANS[name]["overrides"], f"cluster.shard={layout[2:]}"],
        }
        for name, layout in EVERYWHERE
        if layout.startswith(f"{n}-")
    ]


def finish(n: int, folder: Path, todo: list[dict[str, Any]]) -> None:
    process = torchrun(n, str(Path(__file__).with_name("ranks.py")), str(folder), json.dumps(todo))
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, out[-2000:] + err[-6000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs in one process, on 4 ranks, on 2; those on 4 that stop half-way go on on 2 and on 1."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        from launch import environment

        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        one_process(folder, [{**plan, "name": name} for name, plan in PLANS.items()])
        halves = [
            {**plan, "name": f"{plan['name']}-half", "overrides": [*plan["overrides"], f"train.steps={HALF}"]}
            for plan in plans(4)
            if plan["name"] in ("dapo-4-full", "fast-4-none")
        ]
        halves.append({**halves[0], "name": "whole-4-full-half"})
        halves[-1]["overrides"] = [*halves[-1]["overrides"], "checkpoint.format=whole"]
        finish(4, folder, [*plans(4), *halves])
        resumed = []
        for half in halves:
            for ranks in (1, 2):
                shutil.copytree(folder / half["name"], folder / f"{half['name']}-on-{ranks}")
            more = {"resumes": True, "overrides": ["train.steps=3"]}
            one_process(folder, [{**more, "name": f"{half['name']}-on-1"}])
            resumed.append({**more, "name": f"{half['name']}-on-2"})
        finish(2, folder, [*plans(2), *resumed])
    return folder


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return weights_in(newest(run) / "model")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Of a Hugging Face folder, in one file or in many."""
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds beside the model, whole."""
    slices = read_slices(newest(run), lambda _key: None) if has_slices(newest(run)) else {}
    return load_file(newest(run) / "state.safetensors") | slices


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a if a[name].numel())


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Without clock times."""
    read = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("timing.")} for line in read]


def written(run: Path) -> list[list[Any]]:
    """What was chosen and drawn, step by step."""
    return [
        pq.read_table(path, columns=["problem_id", "visit", "response_index", "tokens", "verdict"]).to_pylist()
        for path in sorted((run / "rollouts").glob("*.parquet"))
    ]


@pytest.mark.parametrize(("name", "layout"), EVERYWHERE)
def test_the_same_groups_are_chosen_and_the_same_tokens_drawn_as_in_one_process(runs: Path, name: str, layout: str):
    expected = written(runs / name)
    assert len(expected) == len(lines(runs / name))
    assert written(runs / f"{name}-{layout}") == expected


@pytest.mark.parametrize(("name", "layout"), EXACT)
def test_in_float64_weights_and_metrics_are_those_of_one_process(runs: Path, name: str, layout: str):
    run = runs / f"{name}-{layout}"
    assert furthest(weights(run), weights(runs / name)) < 1e-9
    for line, expected in zip(lines(run), lines(runs / name), strict=True):
        assert line == pytest.approx(expected, abs=1e-9)


def gradient_gap(run: Path, alone: Path, n_updates: int) -> float:
    """The largest distance of an update's gradient from one process's, as a share of its norm."""
    paths = sorted((alone / "gradients").glob("*.safetensors"))
    assert len(paths) == n_updates
    gaps = []
    for path in paths:
        expected, got = load_file(path), load_file(run / "gradients" / path.name)
        norm = torch.cat([g.flatten() for g in expected.values()]).double().norm()
        gap = torch.cat([(got[name] - g).flatten() for name, g in expected.items()]).double().norm()
        gaps.append(float(gap / norm))
    return max(gaps)


@pytest.mark.parametrize("layout", LAYOUTS["float32"])
def test_in_float32_every_updates_gradient_is_within_1e_5_of_its_norm(runs: Path, layout: str):
    assert gradient_gap(runs / f"float32-{layout}", runs / "float32", 3 * 2) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS["bfloat16"])
def test_in_bfloat16_loss_and_gradient_are_as_near_as_its_digits_allow(runs: Path, layout: str):
    line, expected = lines(runs / f"bfloat16-{layout}")[0], lines(runs / "bfloat16")[0]
    for name in ("policy/loss", "policy/grad_norm"):
        assert line[name] == pytest.approx(expected[name], rel=2**-8)
    assert written(runs / f"bfloat16-{layout}") == written(runs / "bfloat16")
    tensors = saved(runs / f"bfloat16-{layout}")
    masters = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.master.")}
    assert masters
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}


@pytest.mark.parametrize("layout", LAYOUTS["dapo"])
def test_evaluation_gives_the_same_table(runs: Path, layout: str):
    expected = lines(runs / "dapo", "eval.jsonl")
    assert [line["step"] for line in expected] == [0, 3]
    assert lines(runs / f"dapo-{layout}", "eval.jsonl") == expected


@pytest.mark.parametrize("layout", LAYOUTS["dapo"])
def test_every_layout_keeps_the_checkpoint_of_the_best_evaluation(runs: Path, layout: str):
    scores = {line["step"]: line["avg@k"] for line in lines(runs / "dapo", "eval.jsonl")}
    best = max(scores, key=lambda step: scores[step])
    kept = [path.name for path in in_order(runs / f"dapo-{layout}" / "checkpoints")]
    assert kept == [name_of(step) for step in sorted({best, 3})]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("half", "straight"), [("dapo-4-full-half", "dapo"), ("fast-4-none-half", "fast"), ("whole-4-full-half", "dapo")]
)
def test_saved_on_4_ranks_it_goes_on_on_fewer(runs: Path, half: str, straight: str, ranks: int):
    run = runs / f"{half}-on-{ranks}"
    assert written(run) == written(runs / straight)
    assert furthest(weights(run), weights(runs / straight)) < 1e-9
    for line, expected in zip(lines(run), lines(runs / straight), strict=True):
        assert line == pytest.approx(expected, abs=1e-9)


def test_a_checkpoint_has_the_same_tensors_from_any_layout(runs: Path):
    for name in ("dapo", "ppo"):
        expected = saved(runs / name)
        assert any(key.startswith("optimizer.exp_avg.") for key in expected)
        for layout in LAYOUTS[name]:
            assert has_slices(newest(runs / f"{name}-{layout}")) == layout.endswith("full")
            assert furthest(saved(runs / f"{name}-{layout}"), expected) < 1e-9


def test_export_from_a_sharded_run_is_one_hugging_face_folder(runs: Path, tmp_path: Path):
    export_run(runs / "dapo-4-full", tmp_path / "out")
    assert furthest(weights_in(tmp_path / "out"), weights(runs / "dapo")) < 1e-9
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert furthest(dict(model.named_parameters()), weights(runs / "dapo")) < 1e-9


def test_only_one_rank_writes(runs: Path):
    assert len(lines(runs / "dapo-4-none")) == 3
    events = lines(runs / "dapo-4-full-half-on-2", "events.jsonl")
    assert [event["kind"] for event in events].count("resume") == 1
