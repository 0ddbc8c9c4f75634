"""A run on the terminal: a live view where there is one, plain lines where there is not."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dapo.tracking.metrics import PART_PREFIX, part_names
from dapo.trainer.observer import Observer
from dapo.trainer.run import Run
from dapo.waiting.registry import waiting


@contextmanager
def terminal_observer(*, is_shown: bool = True) -> Iterator[Observer]:
    """The view for this output. However the run ends, the terminal gets its cursor back."""
    if not is_shown:  # another rank's view is enough
        yield Observer()
        return
    view = LiveView() if sys.stdout.isatty() else PlainLines()
    try:
        yield view
    finally:
        view.close()


def step_line(metrics: Mapping[str, float]) -> str:
    """One line per step, same columns, plain numbers."""
    cells = [
        f"step {int(metrics['step']):>4}",
        f"accuracy {metrics['accuracy']:.3f}",
        f"truncated {100 * metrics.get('length/truncated', 0.0):.1f}%",
        f"mixed groups {100 * metrics['sampling/groups_kept']:.0f}%",
        f"in the batch: reward {metrics.get('reward/mean', 0.0):+.3f}",
        f"length {metrics.get('length/mean', 0.0):.0f}",
        f"entropy {metrics.get('policy/entropy', 0.0):.3f}",
        f"clip low/high {metrics.get('clip/low', 0.0):.4f}/{metrics.get('clip/high', 0.0):.4f}",
        *part_cells(metrics),
        *source_cells(metrics),
        f"{metrics['timing.step_s']:.1f} s",
    ]
    return "  ".join(cells)


def part_cells(metrics: Mapping[str, float]) -> list[str]:
    """The mean of each part of the reward, before its weight; none where there is the verifier's alone."""
    means = {name: metrics.get(f"{PART_PREFIX}{name}/mean") for name in part_names(metrics)}
    return [f"{name} {mean:+.3f}" for name, mean in means.items() if mean is not None]


def source_cells(metrics: Mapping[str, float]) -> list[str]:
    """Of a mixture, each source's accuracy and its share of mixed groups; and how many problems are retired."""
    names = [name.split("/")[1] for name in metrics if name.startswith("source/") and name.endswith("/accuracy")]
    cells = [
        f"{name} {metrics[f'source/{name}/accuracy']:.3f} ({100 * metrics[f'source/{name}/groups_kept']:.0f}% mixed)"
        for name in names
    ]
    return [*cells, *([f"retired {metrics['sampling/retired']:.0f}"] if "sampling/retired" in metrics else [])]


def evaluation_line(line: Mapping[str, Any]) -> str:
    return f"eval {line['set']} after step {line['step']}: " + "  ".join(evaluation_cells(line))


def evaluation_cells(line: Mapping[str, Any]) -> list[str]:
    low, high = line["avg@k_interval"]
    k = line["k"]
    return [
        f"avg@{k} {line['avg@k']:.3f} [{low:.3f}, {high:.3f}]",
        f"pass@{k} {line['pass@k']:.3f}",
        f"maj@{k} {'n/a' if line['maj@k'] is None else format(line['maj@k'], '.3f')}",
        f"unparseable {100 * line['unparseable']:.1f}%",
        *([f"engine faults {line['faults']}"] if line.get("faults") else []),
    ]


def value_line(line: Mapping[str, float], total: int) -> str:
    return (
        f"value pretraining {int(line['step'])} of {total}: loss {line.get('critic/loss', math.nan):.4f}, "
        f"explained variance on held-out problems {line.get('critic/explained_variance', math.nan):+.3f}"
    )


def fit(cells: Sequence[str], width: int) -> str:
    """Cells side by side, broken between cells only; lines after the first are indented."""
    lines = [""]
    for cell in cells:
        longer = f"{lines[-1]}  {cell}" if lines[-1] else cell
        if lines[-1] and len(longer) > width:
            lines.append(f"  {cell}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


def say(text: str) -> None:
    with waiting("standard output: whoever reads it does not"):
        print(text, flush=True)


class PlainLines(Observer):
    """For logs and pipes."""

    def close(self) -> None:
        """Nothing to restore."""

    def on_start(self, run: Run) -> None:
        for problem_set in (*(run.problems.sources or [run.problems]), *run.eval_sets):
            say(f"{problem_set.name}: {len(problem_set.problems):,} problems")
            for note in problem_set.notes:
                say(f"  {note}")

    def on_step(self, metrics: Mapping[str, float]) -> None:
        say(step_line(metrics))

    def on_value_step(self, line: Mapping[str, float], total: int) -> None:
        say(value_line(line, total))

    def on_evaluation(self, line: Mapping[str, Any]) -> None:
        say(evaluation_line(line))

    def on_event(self, kind: str, message: str) -> None:
        say(f"[{kind}] {message}")


class LiveView(Observer):
    """Progress of run, rollouts and updates, the latest metrics, and the evaluations."""

    def __init__(self) -> None:
        self.console = Console(markup=False, emoji=False)  # folders and sets are named by others
        self.progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.steps = self.progress.add_task("steps", total=None)
        self.phase = self.progress.add_task("rollout", total=None)
        self.latest: Mapping[str, float] = {}
        self.live: Live | None = None
        self.drawn = 0.0

    def on_start(self, run: Run) -> None:
        label = "" if run.config.is_paper_algorithm else "  (not the paper's algorithm)"
        self.console.print(f"{run.folder}  preset {run.config.preset}{label}", highlight=False)
        self.progress.update(self.steps, total=run.config.train.steps, completed=run.step)
        self.live = Live(self.picture(), console=self.console, refresh_per_second=4)
        self.live.start()

    def on_groups(self, known: int, wanted: int) -> None:
        self.show("rollout", known, wanted)

    def on_update(self, done: int, total: int) -> None:
        self.show("updates", done, total)

    def on_evaluation_progress(self, done: int, total: int) -> None:
        self.show("evaluation", done, total)

    def on_value_step(self, line: Mapping[str, float], total: int) -> None:
        self.show("critic", int(line["step"]), total)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self.latest = metrics
        self.progress.update(self.steps, completed=int(metrics["step"]))
        self.refresh()

    def on_evaluation(self, line: Mapping[str, Any]) -> None:
        name = str(line["set"]).replace("/", ":").rsplit(":", 1)[-1]  # a file or a module:name, by its last part
        cells = [f"eval {name} after step {line['step']}:", *evaluation_cells(line)]
        self.console.print(fit(cells, self.console.width), highlight=False)

    def on_event(self, kind: str, message: str) -> None:
        self.console.print(f"[{kind}] {message}", highlight=False)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        if self.live is not None:
            self.live.update(self.picture())
            self.live.stop()
            self.live = None

    def show(self, phase: str, done: int, total: int) -> None:
        self.progress.update(self.phase, description=phase, completed=done, total=total)
        if time.monotonic() - self.drawn > 0.25:
            self.refresh()

    def refresh(self) -> None:
        self.drawn = time.monotonic()
        if self.live is not None:
            self.live.update(self.picture())

    def picture(self) -> RenderableType:
        if not self.latest:
            return self.progress
        cells = [
            f"accuracy {self.latest['accuracy']:.3f}",
            f"truncated {100 * self.latest.get('length/truncated', 0.0):.1f}%",
            f"mixed groups {100 * self.latest['sampling/groups_kept']:.0f}%",
            f"in the batch: reward {self.latest.get('reward/mean', 0.0):+.3f}",
            f"length {self.latest.get('length/mean', 0.0):.0f}",
            f"entropy {self.latest.get('policy/entropy', 0.0):.3f}",
            *part_cells(self.latest),
        ]
        return Group(self.progress, Text(fit(cells, self.console.width)))
