"""A verifier that fails on everything stops the run by name; a few failures do not."""

from collections import Counter
from pathlib import Path

import pytest
from toy import recipe

from dapo.errors import ConfigError, VerifierError
from dapo.sampling.collect import MOST_FAILURES, Collector
from dapo.trainer.loop import train
from dapo.trainer.start import start_run
from dapo.types import Judgement, Verdict

RAISES = "def judge(response, answer, meta):\n    raise RuntimeError('no licence for this verifier')\n"
RAISES_LATER = (
    "def judge(response, answer, meta):\n    if response == f'Answer: {answer}':\n        return True\n"
    "    raise RuntimeError('no licence for this verifier')\n"
)


def test_a_verifier_that_raises_on_the_first_problem_does_not_start_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "always_raising_rewards.py").write_text(RAISES)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="to the first problem: CRASH: RuntimeError: no licence for this verifier"):
        start_run(recipe(tmp_path, "rewards.verifier=always_raising_rewards:judge"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_verifier_that_raises_on_everything_else_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "raising_rewards.py").write_text(RAISES_LATER)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = [
        "rewards.verifier=raising_rewards:judge",
        "sampling.max_prompts_tried_per_step=1000",
        "limits.max_response_tokens=64",
    ]
    run = start_run(recipe(tmp_path, *keys, dtype="float32"), tmp_path / "run")
    with pytest.raises(VerifierError, match=f"{MOST_FAILURES} verdicts in a row were CRASH.*no licence"):
        train(run)
    run.close()


def test_a_judgement_between_two_failures_starts_the_count_again():
    collector = Collector.__new__(Collector)
    collector.n_failures = Counter()
    for verdict in [Verdict.CRASH] * (MOST_FAILURES - 1) + [Verdict.WRONG] + [Verdict.TIMEOUT] * (MOST_FAILURES - 1):
        collector._count_failure(Judgement(verdict, -1.0), "")
    with pytest.raises(VerifierError, match=r"rewards\.verifier: "):
        collector._count_failure(Judgement(Verdict.TIMEOUT, -1.0), "")


def test_a_source_whose_verifier_always_fails_stops_the_run_whatever_the_others_say():
    collector = Collector.__new__(Collector)
    collector.n_failures = Counter()
    for _ in range(MOST_FAILURES - 1):
        collector._count_failure(Judgement(Verdict.CRASH, -1.0), "mod:broken")
        collector._count_failure(Judgement(Verdict.CORRECT, 1.0), "")
    with pytest.raises(VerifierError, match="mod:broken: "):
        collector._count_failure(Judgement(Verdict.CRASH, -1.0), "mod:broken")
