"""The gap between engine and trainer that `dapo explain --measure` prints, and which type it recommends."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import recipe

from command_line import dapo
from dapo.learner import precision
from dapo.learner.precision import PrecisionGap, in_batches, measure_precisions, recommended


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(precision, "PROMPTS", 3)
    monkeypatch.setattr(precision, "RESPONSES", 2)


@pytest.mark.slow
def test_each_type_is_sampled_and_scored_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = recipe(tmp_path, "rollout.engine=plain").config
    single, double = measure_precisions(config, (torch.float32, torch.float64), "cpu")
    assert (single.dtype, double.dtype) == ("float32", "float64")
    assert single.tokens == double.tokens > 6  # the same noise
    assert single.is_sound
    assert double.mean <= double.largest < 1e-6  # the engine keeps its log-probs in float32
    assert 0 < single.mean < 1e-5
    shifted = precision.scored
    monkeypatch.setattr(precision, "scored", lambda *given: shifted(*given) + 0.25)  # a trainer that is 0.25 nats off
    (off,) = measure_precisions(config, (torch.float64,), "cpu")
    assert (off.mean, off.largest) == pytest.approx((0.25, 0.25), abs=1e-6)
    assert off.kl == pytest.approx(torch.tensor(0.25).expm1().item() - 0.25, abs=1e-6)


def test_trainer_and_engine_are_compared_at_the_temperature_that_samples(tmp_path: Path):
    config = recipe(tmp_path, "rollout.engine=plain", "sampling.temperature=0.5").config
    (double,) = measure_precisions(config, (torch.float64,), "cpu")
    assert double.tokens > 0
    assert double.largest < 1e-6


def test_border_rows_are_scored_once_in_order_however_many_fit(tmp_path: Path):
    config = recipe(tmp_path).config
    rows = [(Row(range(3)), Row(range(n))) for n in (1, 2, 3, 4, 5)]  # costs 4 to 8
    for budget in (1, 4, 8, 9, 10, 30, 31):
        changed = config.model_copy(update={"train": config.train.model_copy(update={"tokens_per_microbatch": budget})})
        made = list(in_batches(rows, changed))  # type: ignore[arg-type]
        assert [row for part in made for row in part] == rows
        assert all(len(part) == 1 or sum(3 + len(c.tokens) for _, c in part) <= budget for part in made)
    assert not list(in_batches([], config))


class Row:
    """As much of a request or completion as its length."""

    def __init__(self, tokens: range) -> None:
        self.prompt = self.tokens = tokens


BF16 = PrecisionGap("bfloat16", 100, mean=0.004, largest=0.1, kl=1e-4, faults=0)
FP16 = replace(BF16, dtype="float16")


@pytest.mark.parametrize(
    ("bfloat16", "float16", "expected"),
    [
        (BF16, replace(FP16, mean=0.0005), "float16: its gap is 8.0 times smaller"),
        (BF16, replace(FP16, mean=0.002), "float16: its gap is 2.0 times smaller"),  # at the bound
        (BF16, replace(FP16, mean=0.003), "bfloat16: the gap in float16 is 0.75 of its own"),
        (BF16, replace(FP16, mean=0.0005, faults=1), "bfloat16: in float16 this model has log-probs that are not"),
        (BF16, replace(FP16, mean=0.0005, largest=float("inf")), "bfloat16: in float16 this model"),
        (BF16, replace(FP16, mean=0.0), "float16: its gap is 0"),
        (replace(BF16, faults=3), FP16, "float16: in bfloat16 this model has log-probs that are not finite"),
    ],
)
def test_float16_is_recommended_where_it_is_sound_and_clearly_closer(
    bfloat16: PrecisionGap, float16: PrecisionGap, expected: str
):
    assert recommended(bfloat16, float16).startswith(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_that_it_needs_one():
    refused = dapo("explain", "quickstart", "--measure")
    assert refused.returncode == 2
    assert "--measure: needs a GPU" in refused.stderr
    assert "float32" in refused.stderr
    assert "--measure: has no effect" in dapo("explain", "quickstart", "dapo", "--measure").stderr
