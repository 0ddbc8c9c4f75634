"""The forecast: a known curve is found, its interval is honest, and below eight evaluations there is none."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from dapo.report.answers import answer_all, ends
from dapo.report.forecast import LEAST, Curve, curve_of, forecast, saturating, target_step
from dapo.report.load import RunRecord

ROOT = Path(__file__).parents[2]


def curve(steps, scores, error: float = 0.01) -> Curve:
    return Curve(np.array(steps, float), np.array(scores, float), np.full(len(steps), error))


def sigmoid(steps, start: float, ceiling: float, halfway: float, steepness: float):
    """R_0 + (A − R_0)/(1 + (C_mid/C)^B), as ScaleRL (arXiv:2510.13786) writes it."""
    return [start + (ceiling - start) / (1 + (halfway / C) ** steepness) if C else start for C in steps]


def record(n: int, wanted: int = 200, done: int | None = None, **more: object) -> RunRecord:
    """A run evaluated n times, every ten steps, on its way from 0.3 to 0.9."""
    steps = [10 * i for i in range(n)]
    lines = [
        {"step": step, "set": "exam", "k": 8, "avg@k": score, "avg@k_interval": [score - 0.02, score + 0.02]} | more
        for step, score in zip(steps, sigmoid(steps, 0.3, 0.9, 25, 2), strict=True)
    ]
    metrics = [{"step": done or max(1, steps[-1])}]
    return RunRecord(Path("none"), {"train": {"steps": wanted}}, metrics, lines, [], [], [])


def test_the_curve_is_the_start_at_0_half_the_gain_at_c_mid_and_its_ceiling_far_out():
    at = [np.array([x]) for x in (0.2, 0.8, 30.0, 2.0)]
    found = saturating(np.array([0.0, 30.0, 60.0, 1e9]), *at)[0]
    assert found == pytest.approx([0.2, 0.5, 0.2 + 0.6 / (1 + 0.5**2), 0.8])


@pytest.mark.parametrize(("ceiling", "halfway", "steepness"), [(0.9, 20, 1.5), (0.6, 40, 2.0), (0.45, 15, 1.0)])
def test_a_known_curve_is_found_from_its_first_part(ceiling: float, halfway: float, steepness: float):
    steps = [10 * i for i in range(20)]
    scores = sigmoid(steps, 0.3, ceiling, halfway, steepness)
    (end,) = forecast(curve(steps[:12], scores[:12]), [190])
    assert end.value == pytest.approx(scores[-1], abs=0.02)
    assert end.low < scores[-1] < end.high


def test_the_interval_is_wider_with_less_to_go_by_and_further_ahead():
    steps = [10 * i for i in range(14)]
    scores = sigmoid(steps, 0.3, 0.9, 60, 1.5)

    def width(n: int, error: float, step: int) -> float:
        (end,) = forecast(curve(steps[:n], scores[:n], error), [step])
        return end.high - end.low

    assert width(14, 0.01, 200) < width(8, 0.01, 200)
    assert width(10, 0.01, 200) < width(10, 0.05, 200)
    assert width(10, 0.01, 100) < width(10, 0.01, 400)


def test_a_run_that_stands_still_or_falls_is_not_promised_a_rise():
    steps = [10 * i for i in range(10)]
    (flat,) = forecast(curve(steps, [0.4] * 10), [200])
    assert flat.value == pytest.approx(0.4, abs=0.03)
    (falling,) = forecast(curve(steps, sigmoid(steps, 0.6, 0.2, 30, 2)), [200])
    assert falling.value == pytest.approx(0.2, abs=0.05)


def test_scores_stay_between_0_and_1():
    steps = [10 * i for i in range(9)]
    (end,) = forecast(curve(steps, np.linspace(0.5, 0.99, 9)), [1000])
    assert 0.8 < end.low <= end.value <= end.high <= 1


@pytest.mark.parametrize(("n", "is_made"), [(LEAST - 1, False), (LEAST, True), (LEAST + 1, True)])
def test_border_a_forecast_needs_eight_evaluations(n: int, is_made: bool):
    answer = ends(record(n))
    assert answer is not None
    assert answer.question == "Where will it end?"
    assert ("95 % interval" in answer.detail) is is_made
    assert is_made or (answer.answer, answer.detail) == (
        "Too early to tell",
        f"A forecast needs 8 evaluations; there are {n}.",
    )


def test_a_run_that_has_ended_is_asked_whether_twice_the_steps_would_help():
    run = record(10, wanted=90, done=90)
    assert target_step(run) == 180
    answer = ends(run)
    assert answer is not None
    assert answer.question == "Would more steps help?"
    assert answer.answer.endswith("at step 180")
    assert ends(record(LEAST - 1, wanted=60, done=60)) is None  # and no more evaluations will come


def test_without_evaluations_or_with_graded_rewards_there_is_no_forecast():
    assert ends(record(1)) is None
    assert ends(record(10, mean_value=0.5)) is None
    assert curve_of(RunRecord(Path("none"), {}, [], [], [], [], [])) is None
    assert curve_of(record(9, step=0)) is None  # somebody's file: nothing after the first step, or no score at all
    assert curve_of(record(9, **{"avg@k": 1e308})) is None


def test_a_score_of_another_k_is_no_part_of_the_curve_and_its_error_is_half_an_interval_by_1_96():
    run = record(9)
    run.evaluations[3]["k"] = 4
    run.evaluations[5]["avg@k_interval"] = [1e308, -1e308]
    found = curve_of(run)
    assert found is not None
    assert found.steps.tolist() == [0, 10, 20, 40, 50, 60, 70, 80]
    assert found.errors == pytest.approx([0.02 / 1.96] * 4 + [1 / 1.96] + [0.02 / 1.96] * 3)
    assert found.scores[0] == 0.3


def test_a_score_that_was_sampled_otherwise_is_no_part_of_the_curve():
    run = record(9)
    run.eval_problems.extend(
        {"step": step, "set": "exam", "k": 8, "ids": ["p"], "correct": [4], "sampling": [float(step > 20), 1.0, 0]}
        for step in range(0, 90, 10)
    )
    found = curve_of(run)
    assert found is not None
    assert found.steps.tolist() == [30, 40, 50, 60, 70, 80]


def test_of_evaluations_that_scatter_the_interval_covers_the_scatter():
    """A score ±0.05 around 0.5: an interval of one more evaluation is about 2 · 1.96 · 0.05 wide."""
    steps = [10 * i for i in range(20)]
    (end,) = forecast(curve(steps, [0.5 + 0.05 * (-1) ** i for i in range(20)], error=0.001), [200])
    assert 0.15 < end.high - end.low < 0.3
    (surely,) = forecast(curve(steps, [0.5] * 20, error=0.001), [200])
    assert surely.high - surely.low < 0.03
    (few,) = forecast(curve(steps, [0.5] * 20, error=0.05), [200])  # of few problems: so does the next one
    assert few.high - few.low > 2 * 1.96 * 0.05 - 0.01


def calibration():
    spec = importlib.util.spec_from_file_location("calibration", ROOT / "tools" / "forecast_calibration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_calibration_is_what_the_page_says():
    found, _ = calibration().calibrate()
    values = json.loads((ROOT / "docs/results/benchmarks/forecast.json").read_text())["runs"][0]["values"]
    assert found == values
    for fitted in found.values():
        assert fitted["percent of all in the interval"] >= 90
        assert fitted["mean error of the last"] < fitted["mean error of the last if the score stayed"]


def test_the_report_asks_it_among_the_others():
    assert [answer.name for answer in answer_all(record(9), [], [], [])].count("forecast") == 1
    assert "forecast" not in [answer.name for answer in answer_all(record(1), [], [], [])]
