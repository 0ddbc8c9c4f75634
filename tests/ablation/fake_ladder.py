"""Finished runs of a ladder made by hand: scores and metrics are given, so that every figure can be derived."""

import json
from collections.abc import Sequence
from pathlib import Path

from dapo.ablation.arms import ARMS
from dapo.ablation.plan import ArmBudget, Job, plan_jobs
from dapo.config.load import to_toml


def job(out: Path, arm: str, seed: int = 0, *extra: str) -> Job:
    return plan_jobs("ladder", [ARMS[arm]], [seed], ArmBudget(), extra, out)[0]


def write_done(planned: Job, correct: dict[int, Sequence[int]], *, k: int = 4, entropy: float = 0.5) -> None:
    """`correct`: step -> right responses of each problem. 1,000 tokens a step of which 750 are trained, 16 updates."""
    folder, steps = planned.folder, planned.config.train.steps
    (folder / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    (folder / "checkpoints" / f"step-{steps:06d}" / "MANIFEST.json").write_text("{}")
    (folder / "config.toml").write_text(to_toml(planned.config))
    metrics = [
        {
            "step": step, "updates_total": 16 * step, "tokens/generated": 1000, "tokens/trained": 750,
            "policy/entropy": entropy, "length/mean": 20.0, "length/wrong": 22.0, "length/truncated": 0.1,
            "clip/low": 0.01, "clip/high": 0.002, "sampling/groups_kept": 1 - step / steps, "timing.step_s": 2.0,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    name = planned.config.data.eval[0]
    evaluations = [
        {"step": step, "set": name, "k": k, "avg@k": sum(own) / k / len(own), "mean_tokens": 19.0, "truncated": 0.05}
        for step, own in correct.items()
    ]
    problems = [
        {"step": step, "set": name, "k": k, "ids": [f"p{i}" for i in range(len(own))], "correct": list(own)}
        for step, own in correct.items()
    ]
    for file, lines in (("metrics", metrics), ("eval", evaluations), ("eval_problems", problems)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
