"""Run folders made by hand: metrics from formulas, responses from lists, so that every expectation can be derived."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from dapo.report.rollouts.pieces import TokenPieces

CONFIG = """preset = "dapo"
[model]
path = "missing-model"
[data]
train = {train}
[limits]
max_response_tokens = 1000
[train]
steps = {steps}
[checkpoint]
every_steps = 10
[records]
every_steps = {every}
"""

# A run with nothing wrong: every number of the doctor's stays well inside its limits.
HEALTHY: dict[str, float | Callable[[float], float]] = {
    "accuracy": lambda t: 0.3 + 0.4 * t,
    "policy/entropy": 0.4,
    "policy/probability": 0.8,
    "policy/grad_norm": 0.5,
    "policy/skipped_updates": 0,
    "lr": 1e-6,
    "clip/low": 0.004,
    "clip/high": 0.002,
    "length/mean": 300,
    "length/truncated": 0.02,
    "sampling/groups_kept": 0.5,
    "sampling/groups_all_correct": 10,
    "sampling/groups_all_wrong": 10,
    "sampling/groups_trained": 32,
    "engine/gap_mean": 0.005,
    "engine/kl": 0.0005,
    "verdict/unparseable": 0.02,
    "verdict/timeout": 0,
    "verdict/crash": 0,
    "tokens/generated": 1000,
    "tokens/trained": 600,
    "tokens/wasted_all_wrong": 300,
    "tokens/wasted_surplus": 100,
    "timing.rollout_s": 4.0,
    "timing.old_logp_s": 1.5,
    "timing.update_s": 4.0,
    "timing.step_s": 10.0,
}


def metrics(steps: int = 30, **changes: float | Callable[[float], float]) -> list[dict[str, float]]:
    """One line per step; a value may be a function of t, from 0 to 1. `policy__entropy` is policy/entropy."""
    shape = HEALTHY | {name.replace("__", "/").replace("timing/", "timing."): value for name, value in changes.items()}
    lines = []
    for step in range(1, steps + 1):
        t = (step - 1) / max(1, steps - 1)
        lines.append({"step": step} | {n: v(t) if callable(v) else v for n, v in shape.items()})
    return lines


def evaluation(step: int, avg: float, half: float = 0.03, **more: Any) -> dict[str, Any]:
    line = {
        "step": step, "set": "held-out", "problems": 50, "k": 8, "avg@k": avg,
        "avg@k_interval": [avg - half, avg + half], "pass@k": min(1.0, avg + 0.1), "maj@k": avg, "unparseable": 0.0,
        "truncated": 0.0, "mean_tokens": 300.0,
    }  # fmt: skip
    return line | more


def write_run(
    folder: Path,
    lines: Sequence[dict[str, Any]],
    *,
    evaluations: Sequence[dict[str, Any]] = (),
    wanted: int | None = None,
    config: str = "",
    every: int = 0,
    train: str = '"problems.jsonl"',
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    steps = wanted if wanted is not None else (int(lines[-1]["step"]) if lines else 10)
    (folder / "config.toml").write_text(CONFIG.format(steps=steps, every=every, train=train) + config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    return folder


def byte_level(texts: Sequence[str] = ("the answer is 42, wait",), size: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE as Qwen and Llama 3 have it, learnt on a few words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def row(pieces: TokenPieces, text: str, *, problem: str = "p1", index: int = 0, **changes: Any) -> dict[str, Any]:
    """One response, its numbers made up from the position of the token."""
    tokens = [*pieces.tokenizer.encode(text, add_special_tokens=False).ids, *pieces.special]
    n = len(tokens)
    at = np.arange(n, dtype=np.float32)
    base = {
        "step": 10, "problem_id": problem, "question": f"What is {problem}?", "answer": "42", "source": "made",
        "visit": 0,
        "response_index": index, "prompt_tokens": [1, 2], "tokens": np.array(tokens, np.int32), "logp": -at / 10,
        "logp_old": -at / 10, "entropy": at / 20, "advantage": np.full(n, 0.5, np.float32), "ratio": 1 + at / 100,
        "clip": np.zeros(n, np.int8), "version": np.zeros(n, np.int32), "response_text": text, "verdict": "CORRECT",
        "extracted": "42", "reward": 1.0, "reward_raw": 1.0, "reward_overlong": 0.0, "stop_reason": "EOS",
    }  # fmt: skip
    return base | changes


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.table({name: pa.array([one[name] for one in rows]) for name in rows[0]})


def write_rollouts(folder: Path, step: int, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "rollouts" / f"step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table_of(rows), path)
    return path


def save_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer) -> TokenPieces:
    """Where the report looks for it: in the newest checkpoint."""
    home = folder / "checkpoints" / "step-000010" / "model"
    home.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(home / "tokenizer.json"))
    return TokenPieces(tokenizer)
