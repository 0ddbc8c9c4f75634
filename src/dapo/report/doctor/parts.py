"""Findings about a reward in parts: one that is always the same, one that decides everything, one that is gamed."""

from __future__ import annotations

from collections.abc import Iterator

from dapo.commands import dapo_command
from dapo.report.doctor.findings import NOTE, WARNING, Finding, Visit
from dapo.report.parts import parts_of
from dapo.types import CORRECT


def parts(v: Visit) -> Iterator[Finding]:
    """Of the parts that have a weight; the verifier's own has its findings elsewhere."""
    for name, weight in parts_of(v.run):
        if weight is not None and name != CORRECT:
            yield from constant(v, name)
            yield from deciding(v, name)
            yield from gamed(v, name, weight)


def constant(v: Visit, name: str) -> Iterator[Finding]:
    spread, metric = v.last_known(f"reward/part/{name}/std"), f"reward/part/{name}/std"
    if spread is None or spread > 0:
        return
    never = not any(value > 0 for _, value in v.run.series(metric))
    value = v.last_known(f"reward/part/{name}/mean") or 0.0
    since = "in every step" if never else f"since step {v.last_steps[0]} or before"
    yield Finding(
        "constant-part",
        WARNING if never else NOTE,
        f"Reward part {name} is the same for every response",
        f"It is {value:g} for all trained responses, {since}: it adds nothing to any advantage.",
        f"Try its function on some responses (rewards.parts.{name})." if never else "Nothing, if it has been learnt.",
        v.whole if never else v.last_steps,
        (f"reward/part/{name}/mean", metric),
    )


def deciding(v: Visit, name: str) -> Iterator[Finding]:
    share, own = v.last_known(f"reward/part/{name}/share"), v.last_known(f"reward/part/{CORRECT}/share") or 0.0
    if share is not None and share > v.t.deciding_share:
        yield Finding(
            "deciding-part",
            WARNING,
            f"Reward part {name} decides the advantages",
            f"{share:.0%} of the advantages' variance is due to {name}, {own:.0%} to what is correct.",
            f'Lower rewards.parts.{name}.weight, or set rewards.aggregation = "normalize_then_sum".',
            v.last_steps,
            (f"reward/part/{name}/share", f"reward/part/{CORRECT}/share"),
        )


def gamed(v: Visit, name: str, weight: float) -> Iterator[Finding]:
    """It pays more and more while fewer responses are correct; both by more than the steps scatter."""
    metric = f"reward/part/{name}/mean"
    start, end, spread = v.first(metric), v.last_known(metric), v.first(f"reward/part/{name}/std")
    before, now = v.first("accuracy"), v.last("accuracy")
    if start is None or end is None or before is None or now is None:
        return
    rise, fall = (end - start) * (1 if weight > 0 else -1), before - now
    if rise > max(v.t.part_rise * (spread or 0.0), v.noise(metric)) and fall > max(v.t.part_fall, v.noise("accuracy")):
        yield Finding(
            "gamed-part",
            WARNING,
            f"Reward part {name} improves while accuracy falls",
            f"{name} (weight {weight:g}) {start:.3g} at the start, {end:.3g} now; accuracy {before:.3f} and {now:.3f}.",
            f"Read its responses in the browser; lower rewards.parts.{name}.weight, or let {name} pay for correct "
            f"responses only; audit the verdicts ({dapo_command('verify', '--audit', v.run.folder)}).",
            v.whole,
            (metric, "accuracy"),
        )
