"""The tool that measures how far quantized weights move log-probs."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from dapo.models.load import save_policy
from tiny_models import tiny_policy

FILE = Path(__file__).parents[2] / "tools/quantized_gap.py"
spec = importlib.util.spec_from_file_location("quantized_gap", FILE)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
sys.modules["quantized_gap"] = tool  # its dataclass looks itself up
spec.loader.exec_module(tool)


def test_the_gap_is_a_mean_over_tokens_with_the_error_of_problems():
    """|Δ| of 0.1 and 0.3 in one problem, 0.2 in the other: mean 0.2, and each problem's sum is 0.2 times its tokens."""
    written = [tool.Written("a", (1,), (2,)), tool.Written("a", (1,), (3,)), tool.Written("b", (4,), (5,))]
    base = [torch.tensor([-x], dtype=torch.float64) for x in (1.0, 2.0, 3.0)]
    moved = [0.1, -0.3, 0.2]
    found = tool.gap(written, base, [b + d for b, d in zip(base, moved, strict=True)])
    assert found["mean_abs_delta_logp"] == pytest.approx(0.2)
    assert found["standard_error"] == pytest.approx(0)
    assert found["k3"] == pytest.approx(sum(math.exp(d) - 1 - d for d in moved) / 3)
    assert (found["tokens"], found["mean_logp"]) == (3, pytest.approx(-2))
    # 0.1 in one problem and 0.9 in the other, a token each: both are 0.4 off the mean
    two = tool.gap(written[1:], base[1:], [base[1] + 0.1, base[2] + 0.9])
    assert two["standard_error"] == pytest.approx(math.sqrt(2 * (0.4**2 + 0.4**2)) / 2)


def test_it_writes_responses_once_and_finds_four_bits_further_than_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    policy = tiny_policy("llama", torch.float32)
    policy.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    save_policy(policy, tmp_path / "model")
    problems = [{"question": f"w{i} w{i + 1}", "answer": "1"} for i in range(5, 9)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    written = tmp_path / "responses.jsonl"
    arguments = [tmp_path / "model", tmp_path / "problems.jsonl", "--responses", written, "--n-problems", 3]
    arguments += ["--per-problem", 2, "--max-response-tokens", 6, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["quantized_gap.py", *map(str, arguments)])

    def run() -> tuple[dict[str, dict[str, float]], list[dict[str, list[int]]]]:
        tool.main()
        return json.loads(capsys.readouterr().out), [json.loads(line) for line in written.read_text().splitlines()]

    found, rows = run()
    assert len(rows) == 6
    assert len({str(row["problem"]) for row in rows}) == 3
    assert found["nf4"]["tokens"] == sum(len(row["response"]) for row in rows)
    assert 0 < 4 * found["int8"]["mean_abs_delta_logp"] < found["nf4"]["mean_abs_delta_logp"]
    written.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    fewer, left = run()
    assert left == rows[2:]
    assert fewer["nf4"]["tokens"] == sum(len(row["response"]) for row in rows[2:])
