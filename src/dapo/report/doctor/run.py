"""Findings about the run as a whole: faults, evaluations, time, checkpoints, disk, an early end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from dapo.commands import dapo_command
from dapo.report.doctor.findings import NOTE, SEVERE, WARNING, Finding, Visit
from dapo.report.learning import WORSE, Change, change_of, comparable, score_key, score_name
from dapo.report.load import RunRecord, is_number


def faults(v: Visit) -> Iterator[Finding]:
    steps = [(step, n) for step, n in v.run.series("engine/faults") if n > 0]
    exams = [(int(e["step"]), e["faults"]) for e in v.run.evaluations if is_number(e.get("faults")) and e["faults"] > 0]
    if steps or exams:
        sampled, evaluated = (sum(n for _, n in found) for found in (steps, exams))
        where = [step for step, _ in (*steps, *exams)]
        yield Finding(
            "engine-faults",
            WARNING,
            "The engine aborted responses",
            f"Their logits were not finite: {sampled:.0f} responses in {len(steps)} steps, {evaluated:.0f} in "
            f"{len(exams)} evaluations; none of them counts as correct.",
            'Lower train.lr; set model.dtype = "float32" to rule out precision; rollout.on_fault = "stop" '
            "ends a run at the first fault.",
            (min(where), max(where)),
            ("engine/faults",),
        )


def evaluations(v: Visit) -> Iterator[Finding]:
    names = list(dict.fromkeys(str(e["set"]) for e in v.run.evaluations))
    for name in names:
        same = comparable(v.run.evaluations, v.run.eval_problems, name)
        last, key = same[-1], score_key(same[-1])
        best = max(same, key=lambda e: e[key])
        change = change_of(v.run, name)
        is_worse = change is not None and change.verdict == WORSE and change.steps[0] == 0
        end, top = last.get(f"{key}_interval"), best.get(f"{key}_interval")
        has_fallen = bool(end and top and end[1] < top[0])
        if change is not None and is_worse and (change.interval is not None or not has_fallen):
            of_name = f" on {name}" if len(names) > 1 else ""
            without_critic = "" if v.last("critic/loss") is None else "; or train without a critic: preset = dapo"
            yield Finding(
                "worse-than-before",
                SEVERE,
                f"The model is worse than before training{of_name}",
                f"{change.score} on {name}: {change.before:.3f} before, {change.after:.3f} after step "
                f"{change.steps[1]}; {loss_told(change)}.",
                f"Look at what is rewarded (dapo report) and lower train.lr{without_critic}.",
                change.steps,
                ("accuracy", "policy/entropy", "length/mean"),
            )
            has_fallen = has_fallen and best["step"] != 0
        if has_fallen:
            yield Finding(
                "forgetting",
                SEVERE,
                "The evaluation score has dropped",
                f"{score_name(last)} on {name}: {best[key]:.3f} after step {best['step']}, {last[key]:.3f} after "
                f"step {last['step']}; their 95 % intervals do not overlap.",
                f"Lower train.lr. {to_the_better_one(v, name == names[0], int(best['step']))}",
                (int(best["step"]), int(last["step"])),
                ("accuracy", "policy/entropy"),
            )


def to_the_better_one(v: Visit, is_first_set: bool, step: int) -> str:
    checkpoints = v.run.folder / "checkpoints"
    if (checkpoints / f"step-{step:06d}").is_dir():
        return f"Export the better checkpoint: {dapo_command('export', v.run.folder)} --out DIR --step {step}"
    if not checkpoints.is_dir():  # a bundle, or another copy of the record
        return f"Use the checkpoint of step {step}, if the run still has it."
    if is_first_set and not v.run.key("checkpoint", "keep_best", default=False):
        return "The better checkpoint is gone; next time keep it with checkpoint.keep_best = true."
    return "The better checkpoint is gone."


def loss_told(change: Change) -> str:
    if change.interval is None:
        return change.why
    low, high = change.interval
    return f"on the same problems a loss of {-high:.3f} to {-low:.3f} (95 % interval)"


def time_fractions(run: RunRecord) -> list[tuple[str, float, float]]:
    """(phase, seconds, fraction) over the whole run, the largest first; for report and doctor."""
    spent = phases(run)
    whole = sum(spent.values())
    fractions = [(name, seconds, seconds / whole) for name, seconds in spent.items()]
    return sorted(fractions, key=lambda fraction: -fraction[2])


def phases(run: RunRecord) -> dict[str, float]:
    """Seconds of the whole run by phase; the rest of a step is `other`. Saving checkpoints is not timed."""
    names = ("rollout", "old_logp", "update", *PARTS_OF_ROLLOUT)
    sums = {name: sum(v for _, v in run.series(f"timing.{name}_s")) for name in names}
    sums["rollout"] = max(0.0, sums["rollout"] - sum(sums[part] for part in PARTS_OF_ROLLOUT))
    whole = sum(value for _, value in run.series("timing.step_s"))
    sums["other"] = max(0.0, whole - sum(sums.values()))
    sums["evaluation"] = sum(float(e.get("timing.evaluation_s", 0.0)) for e in run.evaluations)
    return {name: seconds for name, seconds in sums.items() if seconds > 0} if whole else {}


PARTS_OF_ROLLOUT = ("tail", "verdicts", "environments")  # in which few responses are generated, or none
PHASES = {
    "rollout": "rollout",
    "tail": "a step's last responses",
    "verdicts": "waiting for verdicts",
    "environments": "waiting for environments",
    "old_logp": "log-prob passes (π_old, reference, critic)",
    "update": "updates",
    "other": "everything else",
    "evaluation": "evaluation",
}


BOUND = {
    "rollout": "Raise rollout.max_concurrent_sequences, waste fewer groups, or lower limits.max_response_tokens.",
    "tail": "Raise sampling.prompts_per_step, or lower limits.max_response_tokens. Not the paper's algorithm: preset "
    "dapo-fast, which continues unfinished responses in the next step (sampling.partial_rollouts).",
    "verdicts": "Raise rewards.workers, or use a faster verifier or judge.",
    "update": "Raise train.tokens_per_microbatch; switch train.gradient_checkpointing off if memory allows.",
    "old_logp": "Raise train.tokens_per_microbatch; lower train.updates_per_step (a step's first update needs no "
    "π_old pass).",
    "other": "Weight sync and writing rollouts: raise records.every_steps, or use a faster disk.",
    "evaluation": "Raise eval.every_steps, or lower eval.k.",
}


def step_time(v: Visit) -> Iterator[Finding]:
    fractions = together(v, time_fractions(v.run))
    idle = v.t.waiting_time_fraction
    limits = {"evaluation": v.t.evaluation_time_fraction, "tail": idle, "verdicts": idle}
    for name, seconds, fraction in fractions:
        if name in BOUND and fraction > limits.get(name, v.t.step_time_fraction):  # environments: slow-environment
            step = statistics.median(value for _, value in v.run.series("timing.step_s"))
            phase = PHASES[name]
            larger = [PHASES[other] for other, _, share in fractions if share > fraction]
            others = f", after {' and '.join(larger)}" if larger else ""
            yield Finding(
                f"bound-by-{name.replace('_', '-')}",
                NOTE,
                f"{'Most' if fraction > 0.5 else 'Much'} of the time goes to {phase}",
                f"{fraction:.0%} of the run's time ({seconds:.0f} of {seconds / fraction:.0f} s){others}; a step takes "
                f"{step:.1f} s.",
                BOUND[name],
                v.whole,
                ("timing.step_s",),
            )


def together(v: Visit, fractions: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Rollout with those of its parts of which nothing is said by themselves."""
    small = [name for name, _, share in fractions if name in PARTS_OF_ROLLOUT and share <= v.t.waiting_time_fraction]
    seconds = sum(spent for name, spent, _ in fractions if name in ("rollout", *small))
    share = sum(share for name, _, share in fractions if name in ("rollout", *small))
    return [("rollout", seconds, share), *(one for one in fractions if one[0] not in ("rollout", *small))]


def checkpoints(v: Visit) -> Iterator[Finding]:
    every = v.run.key("checkpoint", "every_steps", default=None)
    steps = [value for _, value in v.run.series("timing.step_s")]
    if every is None or not steps:
        return
    minutes = statistics.median(steps) * (every or max(v.run.wanted_steps, len(steps))) / 60
    hours = statistics.median(steps) * v.run.wanted_steps / 3600
    is_rare = minutes > v.t.checkpoint_minutes or (
        hours > 1 and every > v.t.checkpoint_run_fraction * v.run.wanted_steps
    )
    if is_rare:
        kept = f"checkpoint.every_steps = {every}" + ("" if every else " (only at the end)")
        advised = max(1, int(1800 / statistics.median(steps)))
        yield Finding(
            "rare-checkpoints",
            WARNING,
            "Checkpoints are rare",
            f"{kept}: a crash loses up to {minutes:.0f} minutes of training.",
            f"{dapo_command('resume', v.run.folder, '--set', f'checkpoint.every_steps={advised}')} writes one about "
            "every half hour.",
            v.whole,
            ("timing.step_s",),
        )


def disk(v: Visit) -> Iterator[Finding]:
    d = v.disk
    if d is None or not d.total:
        return
    if d.free < v.t.disk_free_fraction * d.total or d.free < v.t.disk_checkpoints * d.checkpoint:
        yield Finding(
            "disk-full",
            SEVERE,
            "The disk is nearly full",
            f"{d.free / 2**30:.1f} GiB free of {d.total / 2**30:.0f} ({d.free / d.total:.1%}); a checkpoint takes "
            f"{d.checkpoint / 2**30:.2f} GiB.",
            "Free some space, lower checkpoint.keep, leave out checkpoint.keep_best, or raise records.every_steps.",
        )


def stopped(v: Visit) -> Iterator[Finding]:
    if v.run.state == "stopped" and v.run.metrics:
        yield Finding(
            "stopped",
            NOTE,
            "The run stopped before its end",
            f"{v.run.steps} of {v.run.wanted_steps} steps; nothing was written for {v.run.silent_s / 60:.0f} minutes.",
            dapo_command("resume", v.run.folder),
            (v.run.steps, v.run.steps),
        )
