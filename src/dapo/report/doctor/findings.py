"""What a finding is, the thresholds, and the run as the checks see it."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dapo.report.evidence import MIN_CHANGED_PROBLEMS, MIN_STEPS
from dapo.report.load import RunRecord

SEVERE, WARNING, NOTE = "severe", "warning", "note"
# Of independent normal values of standard deviation 1: the median |difference| of two, √2 · 0.6745; and the standard
# error of a median of n is √(π/2) times that of a mean.
MEDIAN_JUMP, MEDIAN_ERROR = math.sqrt(2) * 0.6745, math.sqrt(math.pi / 2)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a number becomes a finding. Fractions are between 0 and 1."""

    min_steps: int = MIN_STEPS  # fewer show nothing
    window_fraction: float = 0.2  # the first and the last part of a run, compared by their medians
    window_least: int = 3
    window_most: int = 20
    entropy_collapse_ratio: float = 0.25  # of its start, while the model is still often wrong and no longer improves
    entropy_collapse_nats: float = 0.005  # or below this outright
    entropy_excused_accuracy: float = 0.8  # a model that is nearly always correct may be certain
    entropy_explosion_ratio: float = 2.0
    entropy_explosion_rise: float = 0.3  # nats above the start
    improving: float = 0.02  # accuracy, last window against the middle of the run
    clip_fraction: float = 0.01  # of tokens clipped on the heavier side …
    clip_asymmetry: float = 20.0  # … and this many times more than on the other
    length_runaway_ratio: float = 2.0
    truncated: float = 0.15
    truncated_room: float = 3.0  # the limit in mean lengths of right responses, from which on it is not what is missing
    acceptance: float = 0.15
    one_cause: float = 0.75  # of the groups that are all correct or all wrong
    idle_source_prompts: int = 100  # of one source: fewer do not tell 5 % of mixed groups from 15 %
    idle_source_kept: float = 0.05
    hacking_accuracy_rise: float = 0.05
    answer_only_rise: float = 0.3
    answer_only_length_ratio: float = 0.4  # without rollouts: mean length against the start
    dominating_answer: float = 0.5
    dominating_reference: float = 0.25
    dominating_groups: int = 8
    critic_explained: float = -0.05  # explained variance of the returns; about 0 for a constant
    changed_problems: int = MIN_CHANGED_PROBLEMS
    engine_gap_nats: float = 0.05
    engine_kl_nats: float = 0.01
    effective_sample_size: float = 0.8
    dead_gradient_norm: float = 1e-7
    dead_steps: int = 3
    step_time_fraction: float = 0.5
    evaluation_time_fraction: float = 0.3
    waiting_time_fraction: float = 0.3  # for a step's last responses, and for verdicts
    checkpoint_minutes: float = 60.0
    checkpoint_run_fraction: float = 0.5  # of a run longer than an hour
    disk_free_fraction: float = 0.03
    disk_checkpoints: float = 2.0  # space for this many more checkpoints
    verifier_failures: float = 0.01
    unparseable: float = 0.3
    environment_waiting: float = 0.2  # of the rollout's time, for answers
    tool_failures: float = 0.5
    tool_calls: float = 0.02  # in an episode; and turns beyond the first
    deciding_share: float = 0.9  # of the advantages' variance that is due to one part beside what is correct
    part_rise: float = 0.25  # of a part, in its own standard deviations over responses at the start …
    part_fall: float = 0.05  # … while accuracy falls by this
    trend_noise: float = 3.0  # a rise or a fall counts beyond this many standard errors of the windows' difference


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor found."""

    name: str
    level: str  # severe, warning or note
    title: str
    detail: str  # with the numbers
    remedy: str
    steps: tuple[int, int] | None = None
    metrics: tuple[str, ...] = ()  # where to look


@dataclass(frozen=True, slots=True)
class Disk:
    """Space on the volume that holds the run, and the size of its newest checkpoint, in bytes."""

    free: int
    total: int
    checkpoint: int

    @staticmethod
    def of(folder: Path) -> Disk:
        usage = shutil.disk_usage(folder)
        newest = sorted((folder / "checkpoints").glob("step-*"))[-1:]
        size = sum(file.stat().st_size for path in newest for file in path.rglob("*") if file.is_file())
        return Disk(usage.free, usage.total, size)


@dataclass(frozen=True, slots=True)
class Progress:
    """Accuracy (or mean reward) half-way through the run and in the last window."""

    name: str  # the metric
    before: float
    now: float

    @property
    def is_accuracy(self) -> bool:
        return self.name == "accuracy"

    @property
    def gain(self) -> float:
        return self.now - self.before

    def __str__(self) -> str:
        word = "accuracy" if self.is_accuracy else "mean reward"
        return f"{word} {self.before:.3f} half-way, {self.now:.3f} now"


@dataclass(frozen=True, slots=True)
class Visit:
    """A run as the checks see it: medians over windows, the sums of its rollouts, the disk."""

    run: RunRecord
    summaries: Sequence[tuple[int, dict[str, Any]]]  # (step, summary of that step's index)
    disk: Disk | None
    t: Thresholds

    @property
    def width(self) -> int:
        n = len(self.run.metrics)
        return min(max(int(n * self.t.window_fraction), self.t.window_least), self.t.window_most)

    def first(self, name: str) -> float | None:
        return self.run.median(name, slice(0, self.width))

    def middle(self, name: str) -> float | None:
        at = len(self.run.metrics) // 2
        half = (self.width + 1) // 2
        return self.run.median(name, slice(max(0, at - half), at + half))

    def last(self, name: str) -> float | None:
        return self.run.median(name, slice(-self.width, None))

    def last_known(self, name: str) -> float | None:
        """As `last`, of the steps that have the metric: one that trains on nothing has no rewards."""
        values = [value for _, value in self.run.series(name)][-self.width :]
        return statistics.median(values) if values else None

    def noise(self, name: str) -> float:
        """What the first and the last window may differ by through the scatter from step to step alone."""
        values = [value for _, value in self.run.series(name)]
        jumps = sorted(abs(b - a) for a, b in pairwise(values))
        if not jumps:
            return 0.0
        scatter = statistics.median(jumps) / MEDIAN_JUMP
        return self.t.trend_noise * MEDIAN_ERROR * scatter * math.sqrt(2 / self.width)

    @property
    def progress(self) -> Progress | None:
        """Accuracy, or the reward where no response counts as correct (graded rewards); None without either."""
        for name in ("accuracy", "reward/raw"):
            start, before, now = self.first(name), self.middle(name), self.last(name)
            if before is not None and now is not None and (name != "accuracy" or start or before or now):
                return Progress(name, before, now)
        return None

    @property
    def is_improving(self) -> bool:
        """Since half-way; a gain in reward is measured against the run's own range. True where there is no data."""
        progress = self.progress
        if progress is None:
            return True
        values = [value for _, value in self.run.series(progress.name)]
        return progress.gain >= self.t.improving * (1.0 if progress.is_accuracy else max(values) - min(values) or 1.0)

    @property
    def is_stuck(self) -> bool:
        """Still often wrong, and no longer improving."""
        progress = self.progress
        is_right = progress is not None and progress.is_accuracy and progress.now >= self.t.entropy_excused_accuracy
        return not is_right and not self.is_improving

    @property
    def last_steps(self) -> tuple[int, int]:
        shown = self.run.metrics[-self.width :]
        return int(shown[0]["step"]), int(shown[-1]["step"])

    @property
    def whole(self) -> tuple[int, int]:
        return int(self.run.metrics[0]["step"]), self.run.steps
