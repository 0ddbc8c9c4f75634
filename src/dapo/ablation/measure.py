"""What a run folder says about its arm: evaluations with their per-problem scores, and the shape of its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.ablation.plan import Job
from dapo.config.renamed import in_todays_metrics
from dapo.config.sources import eval_sources
from dapo.files import read_lines

END_STEPS = 10  # the end of a run is the mean over this many last steps

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run took up to some step; tokens and seconds include value pretraining, but no evaluations."""

    updates: int
    tokens: int  # generated
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation: where the run stood, and each problem's share of correct responses."""

    step: int
    spent: Spent
    scores: Scores  # [P]
    mean_tokens: float
    truncated: float

    @property
    def avg(self) -> float:
        return float(self.scores.mean())


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished run."""

    seed: int
    folder: Path
    evaluations: tuple[Evaluated, ...]
    problems: tuple[str, ...]
    k: int
    entropy: float  # at the end
    length: float  # at the end, of trained responses
    length_wrong: float  # at the end, of wrong ones
    truncated: float  # whole run, of verified responses
    truncated_end: float
    clip: float  # whole run, both sides
    waste: float  # generated tokens that entered no loss
    mixed_groups: float | None  # share of the trained groups that are mixed, whole run; None with a critic
    mixed_groups_end: float | None
    step_seconds: float

    @property
    def end(self) -> Evaluated:
        return self.evaluations[-1]

    @property
    def late(self) -> Scores:
        """[P] mean over the evaluations of the last quarter of the run: a single one moves with the last updates."""
        steps = self.end.step
        return (
            np.mean([e.scores for e in self.evaluations if e.step > 0.75 * steps], axis=0) if steps else self.end.scores
        )

    @property
    def best(self) -> Evaluated:
        return max(self.evaluations, key=lambda evaluation: evaluation.avg)


def measure(job: Job) -> Measured:
    """Read a finished run. Where there are several evaluation sets, the first counts."""
    metrics = [in_todays_metrics(line) for line in read_lines(job.folder / "metrics.jsonl")]
    pretraining = list(read_lines(job.folder / "value.jsonl"))
    evaluations, problems, k = evaluations_of(job, spent_by_step(metrics, pretraining))
    end = metrics[-END_STEPS:]
    trained = total(metrics, "tokens/trained")
    generated = total(metrics, "tokens/generated") + total(pretraining, "tokens/generated")
    return Measured(
        seed=job.seed,
        folder=job.folder,
        evaluations=evaluations,
        problems=problems,
        k=k,
        entropy=mean(end, "policy/entropy"),
        length=mean(end, "length/mean"),
        length_wrong=mean(end, "length/wrong"),
        truncated=mean(metrics, "length/truncated"),
        truncated_end=mean(end, "length/truncated"),
        clip=mean(metrics, "clip/low") + mean(metrics, "clip/high"),
        waste=1 - trained / generated if generated else 0.0,
        mixed_groups=mixed_groups(job, metrics),
        mixed_groups_end=mixed_groups(job, end),
        step_seconds=total(metrics, "timing.step_s") + total(pretraining, "timing.step_s"),
    )


def spent_by_step(metrics: list[dict[str, Any]], pretraining: list[dict[str, Any]]) -> dict[int, Spent]:
    """Step -> what had been spent at its end; 0 -> by value pretraining."""
    last = Spent(0, int(total(pretraining, "tokens/generated")), total(pretraining, "timing.step_s"))
    spent = {0: last}
    for line in metrics:
        tokens, seconds = last.tokens + int(line["tokens/generated"]), last.seconds + float(line["timing.step_s"])
        spent[int(line["step"])] = last = Spent(int(line["updates_total"]), tokens, seconds)
    return spent


def evaluations_of(job: Job, spent: dict[int, Spent]) -> tuple[tuple[Evaluated, ...], tuple[str, ...], int]:
    """Every evaluation of the first set, with what had been spent by then."""
    name = eval_sources(job.config)[0].name
    shapes = {line["step"]: line for line in read_lines(job.folder / "eval.jsonl") if line["set"] == name}
    found, problems, k = [], (), 0
    for line in read_lines(job.folder / "eval_problems.jsonl"):
        step = int(line["step"])
        if line["set"] != name or step not in shapes:
            continue
        problems, k = tuple(line["ids"]), int(line["k"])
        scores = np.array(line["correct"], dtype=np.float64) / k
        shape = shapes[step]
        found.append(Evaluated(step, spent[step], scores, shape["mean_tokens"], shape["truncated"]))
    return tuple(found), problems, k


def mixed_groups(job: Job, lines: list[dict[str, Any]]) -> float | None:
    """With dynamic sampling every trained group is mixed; without it, some are.

    None with a critic, which learns from any response.
    """
    if job.config.has_critic:
        return None
    if job.config.sampling.dynamic:
        return 1.0
    return mean(lines, "sampling/groups_kept")


def mean(lines: list[dict[str, Any]], name: str) -> float:
    values = [float(line[name]) for line in lines if name in line]
    return float(np.mean(values)) if values else 0.0


def total(lines: list[dict[str, Any]], name: str) -> float:
    return float(sum(float(line.get(name, 0.0)) for line in lines))
