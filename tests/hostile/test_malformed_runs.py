"""Whatever the files of a run folder hold, every command that reads one ends with a page or a message, no traceback."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_runs import evaluation, metrics, write_run

from command_line import dapo

DEEP = "[" * 100_000 + "]" * 100_000
NAN, INF = float("nan"), float("inf")
PER_PROBLEM = {"step": 1, "set": "a", "k": 2, "ids": ["a"], "questions": ["q"], "correct": [1]}
ROW: dict[str, Any] = {
    "problem_id": ["p", "p"], "visit": [0, 0], "question": ["q", "q"], "answer": ["1", "1"], "verdict": ["CORRECT"] * 2,
    "response_text": ["1", "2"], "stop_reason": ["EOS", "EOS"], "extracted": ["1", "2"], "reward": [1.0, -1.0],
    "tokens": [[1, 2], [3]], "logp": [[0.1, 0.2], [0.1]], "clip": [[0, 1], [0]], "advantage": [[1.0, 1.0], [1.0]],
}  # fmt: skip


def lines(*records: object) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


# file -> what it may hold
TEXTS = {
    "metrics.jsonl": [
        lines({"step": 1, "reward/mean": {"nested": [1]}}, {"step": 2, "sampling/groups_trained": {"a": 1}}),
        lines(
            {"step": NAN},
            {"step": INF},
            {"step": 1.5},
            {"step": 10**400},
            {"step": "1"},
            {"step": None},
            {"step": True},
        ),
        lines({"step": 1, "timing.step_s": {"a": 1}}, {"step": 2, "timing.step_s": "x"}, [], 3, None),
        lines({"step": 1, "a": 1}, DEEP),
        lines({"step": -5, "reward/mean": "high"}, {"step": 3, "sampling/groups_trained": "many"}),
        "\x00\xff\n",
    ],
    "eval.jsonl": [
        lines({**evaluation(0, 0.5), "set": {"a": 1}}, {**evaluation(1, 0.5), "set": ["b"]}),
        lines({**evaluation(0, 0.5), "avg@k_interval": [0.1]}, {**evaluation(1, 0.5), "avg@k_interval": [1, 2, 3]}),
        lines({**evaluation(0, 0.5), "k": "8"}, {**evaluation(1, 0.5), "k": 1e300}, {**evaluation(1, 0.5), "k": 0.5}),
        lines({**evaluation(0, 0.5), "problems": "many"}, {**evaluation(1, 0.5), "pass@k": {"x": 1}, "maj@k": "y"}),
        lines({**evaluation(0, 0.5), "by_source": {"a": {"b": 1}}}, {**evaluation(1, 0.5), "mean_value": [1]}),
        lines({"step": 0}, {"step": NAN, "set": "a", "k": 1, "avg@k": 1, "avg@k_interval": [0, 1]}, DEEP),
    ],
    "events.jsonl": [
        lines({"step": "x", "kind": {"a": 1}, "message": [1]}, {"step": NAN}, {"step": [1]}, {"kind": "budget"}, DEEP),
        lines({"step": {"a": 1}, "kind": "budget", "message": {"a": 1}}, {"step": 10**400, "kind": "x"}),
    ],
    "eval_problems.jsonl": [
        lines(PER_PROBLEM, {**PER_PROBLEM, "step": 2, "set": {"a": 1}}, {**PER_PROBLEM, "correct": ["x"]}, DEEP),
        lines(PER_PROBLEM, {**PER_PROBLEM, "step": 2, "values": "x"}, {**PER_PROBLEM, "step": 3, "values": [[1]]}),
        lines(PER_PROBLEM, {**PER_PROBLEM, "step": 2, "values": [1, 2]}, {**PER_PROBLEM, "step": 3, "sampling": "x"}),
        lines(
            {**PER_PROBLEM, "k": 1e300},
            {**PER_PROBLEM, "step": 2, "correct": [1e308]},
            {**PER_PROBLEM, "step": 10**400},
        ),
    ],
    "ledger.jsonl": [
        lines({"step": {"a": 1}, "groups": [["a", 0, "trained"]]}, DEEP),
        lines({"step": 1, "groups": [["a", 0, ["trained"]]]}, {"step": 10**400, "groups": {}}),
        lines({"step": 1, "groups": [["a", 10**400, "trained", 10**400, 1, 1, 1]]}),
        "\x00\xff\n",
    ],
    "value.jsonl": [lines({"step": {"a": 1}}, {"step": 1, "value/loss": {"a": 1}}, DEEP)],
    "config.toml": [
        'preset = "dapo"\ntrain = 3\neval = 1\ndata = "x"\nrollouts = []\n',
        'preset = ["dapo"]\n[train]\nsteps = "many"\n[records]\nevery_steps = "x"\n',
        "[train]\nsteps = inf\n[eval]\nevery_steps = nan\n",
        "a = " + "[" * 5_000 + "]" * 5_000 + "\n",
        "[train]\nsteps = 1e400\nlr = 1e308\n",
        "\ufeff= 3\n",
    ],
    "phrases.toml": [
        "reflection = 3\n",
        "reflection = [3]\n",
        "x",
        'reflection = ["' + "a" * 100_000 + '"]\n',
        "[reflection]\na=1\n",
    ],
}
TABLES = {
    "no columns": {"x": [1]},
    "no text": {name: ROW[name] for name in ROW if name != "response_text"},
    "no ids": {name: ROW[name] for name in ROW if name != "problem_id"},
    "no tokens": {name: ROW[name] for name in ROW if name != "tokens"},
    "numbers for text": ROW | {"response_text": [1, 2], "problem_id": [1, 2], "verdict": [1.5, 2.5]},
    "text for numbers": ROW | {"reward": ["a", "b"], "visit": ["x", "y"]},
    "texts for tokens": ROW | {"tokens": [["a"], ["b", "c"]], "clip": [["a"], ["b"]]},
    "tokens that are none": ROW | {"tokens": [[-1, 10**12], [2**62]]},
    "other lengths": ROW | {"logp": [[0.1], [0.1, 0.2, 0.3]], "clip": [[1] * 9, []], "advantage": [[], [1.0]]},
    "nothing": {name: [None, None] for name in ROW},
    "no rows": {name: [] for name in ROW},
    "nan": ROW | {"reward": [NAN, INF], "visit": [NAN, INF], "logp": [[NAN, INF], [NAN]]},
    "a stop reason of its own": ROW | {"stop_reason": ["TIRED", ""], "verdict": ["MAYBE", ""]},
}  # fmt: skip
COMMANDS = [
    ["report", "RUN"], ["report", "RUN", "RUN"],
    ["report", "RUN", "--terminal"], ["report", "RUN", "--terminal", "--problem", "p"],
    ["doctor", "RUN"], ["doctor", "RUN", "--json"],
    ["ledger", "RUN"], ["explain", "RUN"], ["export", "RUN", "--out", "RUN/out"],
]  # fmt: skip


def all_end(run: Path, *more: list[str]) -> None:
    for words in [*COMMANDS, *more]:
        answer = dapo(*(word.replace("RUN", str(run)) for word in words))  # raises what is no message of ours
        assert answer.returncode in (0, 1, 2), words
        assert "Traceback" not in answer.stderr, words


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "run", metrics(3), evaluations=[evaluation(0, 0.3), evaluation(3, 0.5)], wanted=3, every=1
    )


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=[] if at == 0 else [pytest.mark.slow])  # every day one of each file
        for name in TEXTS
        for at in range(len(TEXTS[name]))
    ],
)
def test_files_of_lines_may_hold_anything(name, at, run):
    (run / name).write_text(TEXTS[name][at])
    all_end(run)


@pytest.mark.parametrize(
    "table", [pytest.param(table, marks=[pytest.mark.slow] if at % 4 else []) for at, table in enumerate(TABLES)]
)
def test_rollouts_may_hold_anything(table, run):
    (run / "rollouts").mkdir(exist_ok=True)
    pq.write_table(pa.table(TABLES[table]), run / "rollouts" / "step-000003.parquet")
    all_end(run, ["verify", "--audit", "RUN", "--verifier", "exact"])
