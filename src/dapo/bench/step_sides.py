"""The steps of either side: a run of this project in this process, TRL's GRPOTrainer in one of its own."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.bench import trl_peer
from dapo.bench.peer_process import run_peer
from dapo.bench.step_plan import StepPlan
from dapo.bench.timing import free_memory
from dapo.types import Judge, Judgement, Task, Verdict

if TYPE_CHECKING:
    from dapo.trainer.run import Run

Row = dict[str, Any]  # what is known of a side


def seconds_of(marks: list[tuple[float, float]]) -> Row:
    """Of every step but the first, from the clocks (wall, CPU) before the first and after each step."""
    wall, cpu = ([b[i] - a[i] for a, b in pairwise(marks)] for i in (0, 1))
    return {"wall": wall[1:], "cpu": cpu[1:], "first_s": wall[0]}


class DigitFraction:
    """TRL's reward as a judge: graded, at once, in this process. Implements `Judge`."""

    def __init__(self) -> None:
        self.scores: dict[int, float] = {}
        self.n_tickets = 0

    def submit(self, task: Task) -> int:
        self.n_tickets += 1
        self.scores[self.n_tickets] = trl_peer.digit_fraction([task.response])[0]
        return self.n_tickets

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        return {ticket: Judgement(Verdict.WRONG, self.scores.pop(ticket), graded=True) for ticket in tickets}


def our_steps(plan: StepPlan, folder: Path) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """A run of this project as `dapo train` makes it, step by step; nothing is evaluated, saved or recorded."""
    import torch

    from dapo.trainer.loop import train_step

    run = make_run(plan, folder)
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        if plan.device == "cuda":
            torch.cuda.synchronize()
        marks.append((time.perf_counter(), time.process_time()))

    mark()
    for step in run.remaining_steps():
        train_step(run, step)
        mark()
    run.close()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("timing.rollout_s", "timing.old_logp_s", "timing.update_s")
    parts = {name: statistics.median(line[name] for line in lines[1:]) for name in names}
    del run
    free_memory()
    return marks, parts


def make_run(plan: StepPlan, folder: Path) -> Run:
    from dapo.trainer.api import with_overrides
    from dapo.trainer.start import begin_run

    problems = folder / "problems.jsonl"
    lines = [{"id": str(i), "question": trl_peer.sum_of(i), "answer": "0"} for i in range(plan.prompts * plan.steps)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    changes = {
        "model.path": str(folder / "model"), "data.train": str(problems),
        "limits.max_prompt_tokens": 16, "limits.max_response_tokens": plan.tokens,
        "shaping.overlong_filter": False, "shaping.overlong_penalty": 0.0,
        "sampling.dynamic": False, "sampling.prompts_per_step": plan.prompts,
        "sampling.responses_per_prompt": plan.responses,
        "rollout.max_concurrent_sequences": plan.prompts * plan.responses,
        "train.steps": plan.steps, "train.lr": plan.lr, "train.warmup_steps": 0, "train.updates_per_step": 1,
        "train.tokens_per_microbatch": 65536 if plan.device == "cuda" else 8192, "train.seed": plan.seed,
        "eval.every_steps": 0, "checkpoint.every_steps": 0, "records.every_steps": 0,
    }  # fmt: skip
    run = begin_run(
        with_overrides("quickstart", [f"{key}={json.dumps(value)}" for key, value in changes.items()]), folder / "run"
    )
    judge: Judge = DigitFraction()
    run.collector.verifier = judge
    return run


def our_settings(plan: StepPlan) -> str:
    from dapo.models.kernels.build import library

    on_cpu = "float32, parts in torch" if library() is None else "float32, parts compiled"
    precision = "bf16, float32 masters" if plan.device == "cuda" else on_cpu
    return f'preset "dapo", local engine, {precision}, without dynamic sampling, one update'


def peer_steps(plan: StepPlan, folder: Path, python: str, minutes: float) -> Row:
    (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    reason, words = run_peer(python, Path(trl_peer.__file__), folder, threads=plan.threads, minutes=minutes)
    lines = [json.loads(line) for line in words if line.startswith('{"trl"')]
    if not lines:
        return {"settings": f"did not run: {reason}"}
    return seconds_of(lines[0]["marks"]) | {"settings": f"{lines[0]['trl']}: {lines[0]['settings']}"}
