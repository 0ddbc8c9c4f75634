"""The answers at the top of the report say what their numbers say."""

from pathlib import Path

import pytest
from fake_runs import metrics, write_run

from dapo.report.answers import GOOD, PLAIN, collapsed
from dapo.report.doctor import examine
from dapo.report.load import load_run


@pytest.mark.parametrize(
    ("end", "answer", "tone"), [(0.9, "No", GOOD), (0.25, "Not yet", PLAIN), (0.6, "Not yet", PLAIN)]
)
def test_more_certain_is_good_only_where_it_is_more_often_right(tmp_path: Path, end: float, answer: str, tone: str):
    # Entropy falls to 0.37 of its start: too little for the doctor, enough to say something of accuracy.
    lines = metrics(8, policy__entropy=lambda t: 1.0 - 0.63 * t, accuracy=lambda t: 0.6 + (end - 0.6) * t)
    run = load_run(write_run(tmp_path, lines))
    said = collapsed(run, examine(run))
    assert (said.answer, said.tone) == (answer, tone)
    assert f"(0.60 → {end:.2f})" in said.detail
    assert ("more often right" in said.detail.replace("not more often right", "")) == (end > 0.6)
