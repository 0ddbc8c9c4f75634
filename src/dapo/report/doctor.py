"""What is wrong with a run, by name: each finding cites its numbers and steps, and says what to do.

The thresholds stand in one place, `Thresholds`; docs/doctor.md says why they are what they are.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dapo.report.load import RunRecord, is_number

SEVERE, WARNING, NOTE = "severe", "warning", "note"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a number is worth a word. Shares are between 0 and 1."""

    min_steps: int = 6  # fewer steps say nothing of a trend
    window_share: float = 0.2  # the first and the last so much of a run are compared, by their medians
    window_least: int = 3
    window_most: int = 20
    entropy_collapse_ratio: float = 0.25  # of its start, while the model is still often wrong and no longer improves
    entropy_collapse_nats: float = 0.005  # or below this outright
    entropy_excused_accuracy: float = 0.8  # a model that is right has reason to be certain
    entropy_explosion_ratio: float = 2.0
    entropy_explosion_rise: float = 0.3  # nats above the start
    improving: float = 0.02  # accuracy, last window against the middle of the run
    clip_share: float = 0.01  # of tokens clipped on the heavier side …
    clip_asymmetry: float = 20.0  # … and so many times more than on the other
    length_runaway_ratio: float = 2.0
    truncated: float = 0.15
    acceptance: float = 0.15
    one_cause: float = 0.75  # of the groups that are all right or all wrong
    hacking_accuracy_rise: float = 0.05
    answer_only_rise: float = 0.3
    answer_only_length_ratio: float = 0.4  # without rollouts: mean length against the start
    dominating_answer: float = 0.5
    dominating_reference: float = 0.25
    dominating_groups: int = 8
    engine_gap_nats: float = 0.05
    engine_kl_nats: float = 0.01
    effective_sample_size: float = 0.8
    dead_gradient_norm: float = 1e-7
    dead_steps: int = 3
    step_time_share: float = 0.5
    evaluation_time_share: float = 0.3
    checkpoint_minutes: float = 60.0
    checkpoint_run_share: float = 0.5  # of a run longer than an hour
    disk_free_share: float = 0.03
    disk_checkpoints: float = 2.0  # room for so many more checkpoints
    verifier_failures: float = 0.01
    unparseable: float = 0.3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor saw."""

    name: str
    level: str  # severe, warning or note
    title: str
    detail: str  # with its numbers
    remedy: str
    steps: tuple[int, int] | None = None
    metrics: tuple[str, ...] = ()  # where to look


@dataclass(frozen=True, slots=True)
class Disk:
    """Room on the volume that holds the run, and the size of its newest checkpoint, in bytes."""

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
class Visit:
    """A run as the doctor looks at it: its windows and medians, the sums of its rollouts, the disk."""

    run: RunRecord
    summaries: Sequence[tuple[int, dict[str, Any]]]  # (step, summary of that step's index)
    disk: Disk | None
    t: Thresholds

    @property
    def width(self) -> int:
        n = len(self.run.metrics)
        return min(max(int(n * self.t.window_share), self.t.window_least), self.t.window_most)

    def first(self, name: str) -> float | None:
        return self.run.median(name, slice(0, self.width))

    def middle(self, name: str) -> float | None:
        at = len(self.run.metrics) // 2
        half = (self.width + 1) // 2
        return self.run.median(name, slice(max(0, at - half), at + half))

    def last(self, name: str) -> float | None:
        return self.run.median(name, slice(-self.width, None))

    @property
    def last_steps(self) -> tuple[int, int]:
        shown = self.run.metrics[-self.width :]
        return int(shown[0]["step"]), int(shown[-1]["step"])

    @property
    def whole(self) -> tuple[int, int]:
        return int(self.run.metrics[0]["step"]), self.run.steps

    @property
    def has_trend(self) -> bool:
        return len(self.run.metrics) >= self.t.min_steps


def examine(
    run: RunRecord,
    summaries: Sequence[tuple[int, dict[str, Any]]] = (),
    *,
    disk: Disk | None = None,
    thresholds: Thresholds | None = None,
) -> list[Finding]:
    """Everything the doctor sees, the worst first."""
    visit = Visit(run, summaries, disk, thresholds or Thresholds())
    found = [finding for check in CHECKS for finding in check(visit)]
    order = {SEVERE: 0, WARNING: 1, NOTE: 2}
    return sorted(found, key=lambda finding: order[finding.level])


def verdict(findings: Sequence[Finding], run: RunRecord) -> str:
    """One line: a clean bill, or what is wrong."""
    if not run.metrics:
        return "No step has ended yet: nothing to examine."
    wrong = [finding for finding in findings if finding.level != NOTE]
    if not wrong:
        return "Clean bill: nothing found that needs attention."
    return "; ".join(finding.title for finding in wrong) + "."


def to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


# ------------------------------------------------------------------ the checks, each fires or stays silent


def entropy(v: Visit) -> Iterator[Finding]:
    start, end = v.first("policy/entropy"), v.last("policy/entropy")
    if not v.has_trend or start is None or end is None:
        return
    accuracy, before = v.last("accuracy") or 0.0, v.middle("accuracy") or 0.0
    is_stuck = accuracy < v.t.entropy_excused_accuracy and accuracy - before < v.t.improving
    if (end < v.t.entropy_collapse_ratio * start and is_stuck) or (
        end < v.t.entropy_collapse_nats and accuracy < v.t.entropy_excused_accuracy
    ):
        yield Finding(
            "entropy-collapse",
            SEVERE,
            "Entropy has collapsed",
            f"{start:.3f} nats at the start, {end:.4f} now{share_of(end, start)}; accuracy {before:.3f} half-way, "
            f"{accuracy:.3f} now: the model has stopped exploring before it was right.",
            "Raise algorithm.clip.high (the paper: 0.28), lower train.lr, or go back to an earlier checkpoint.",
            v.whole,
            ("policy/entropy", "policy/probability", "clip/high"),
        )
    if end > v.t.entropy_explosion_ratio * start and end - start > v.t.entropy_explosion_rise:
        yield Finding(
            "entropy-explosion",
            SEVERE,
            "Entropy is exploding",
            f"{start:.3f} nats at the start, {end:.3f} now{share_of(end, start)}: the text is turning into noise.",
            "Lower train.lr or algorithm.clip.high; look at the truncated share and at the engine gap.",
            v.whole,
            ("policy/entropy", "length/truncated", "engine/gap_mean"),
        )


def share_of(end: float, start: float) -> str:
    """What is left of the start; nothing where it was 0."""
    return f" ({end / start:.0%})" if start else ""


def clipping(v: Visit) -> Iterator[Finding]:
    low, high = v.last("clip/low"), v.last("clip/high")
    if low is None or high is None:
        return
    heavy, light = max(low, high), min(low, high)
    if heavy < v.t.clip_share or heavy < v.t.clip_asymmetry * light:
        return
    side, other = ("high", "low") if high > low else ("low", "high")
    if side == "high":
        why, remedy = "pushes up are cut, so new ideas cannot grow", "Raise algorithm.clip.high, or lower train.lr."
    else:
        why = "pushes down are cut; wrong tokens are let go slowly"
        remedy = (
            "Lower train.lr or train.updates_per_step; leave algorithm.clip.low alone (raising it starves exploration)."
        )
    yield Finding(
        "one-sided-clipping",
        WARNING,
        f"Clipping is one-sided ({side})",
        f"{heavy:.2%} of tokens are clipped {side}, {light:.3%} {other}: {why}.",
        remedy,
        v.last_steps,
        ("clip/low", "clip/high"),
    )


def length(v: Visit) -> Iterator[Finding]:
    start, end = v.first("length/mean"), v.last("length/mean")
    if v.has_trend and start and end and end > v.t.length_runaway_ratio * start:
        gain = (v.last("accuracy") or 0.0) - (v.middle("accuracy") or 0.0)
        if gain < v.t.improving:
            yield Finding(
                "length-runaway",
                WARNING,
                "Responses grow without getting better",
                f"Mean length {start:.0f} tokens at the start, {end:.0f} now ({end / start:.1f} times); accuracy has "
                f"changed by {gain:+.3f} since half-way.",
                brevity(v.run),
                v.whole,
                ("length/mean", "length/p90"),
            )
    share = v.last("length/truncated")
    if share is not None and share > v.t.truncated:
        limit = v.run.key("limits", "max_response_tokens", default="?")
        judged = "a truncated response never counts as right"
        if v.run.key("rewards", "truncated_may_be_correct", default=False):
            judged = "what stands in their text is judged all the same (rewards.truncated_may_be_correct)"
        teach = "" if is_punished(v.run) else ", or teach brevity with shaping.overlong_penalty = 1.0"
        yield Finding(
            "truncation",
            WARNING,
            "Many responses are cut off",
            f"{share:.1%} of the judged responses ran into limits.max_response_tokens = {limit}; {judged}.",
            f"Raise limits.max_response_tokens{teach}.",
            v.last_steps,
            ("length/truncated", "length/max"),
        )


def is_punished(run: RunRecord) -> bool:
    return bool(run.key("shaping", "overlong_penalty", default=0.0))


def brevity(run: RunRecord) -> str:
    """What speaks against length and is not on yet."""
    advice = []
    if not is_punished(run):
        advice.append("switch the overlong punishment on (shaping.overlong_penalty = 1.0)")
    if run.key("algorithm", "mean") != "token":
        advice.append('use algorithm.mean = "token"')
    if not advice:
        advice.append("lower limits.max_response_tokens or widen shaping.overlong_buffer_tokens")
    text = ", ".join([*advice, "and read the longest responses in the browser."])
    return text[0].upper() + text[1:]


def acceptance(v: Visit) -> Iterator[Finding]:
    share = v.last("sampling/acceptance")
    if share is None or share >= v.t.acceptance:
        return
    right, wrong = v.last("sampling/groups_all_right") or 0.0, v.last("sampling/groups_all_wrong") or 0.0
    uniform = right + wrong
    has_critic = v.run.key("algorithm", "advantage") == "gae"
    numbers = f"{share:.1%} of the groups are informative; of the others {right:.0f} a step were all right and "
    numbers += f"{wrong:.0f} all wrong."
    if not v.run.key("sampling", "dynamic", default=True):
        numbers += f" They are trained on{'' if has_critic else lone_advantage(v.run)}."
    if uniform and right >= v.t.one_cause * uniform:
        name, title = "too-easy", "The problems have become too easy"
        remedy = "Add harder problems (dapo data probe --select 0.1 0.9), or stop: there is little left to learn here."
    elif uniform and wrong >= v.t.one_cause * uniform:
        name, title = "too-hard", "The problems are too hard"
        remedy = (
            "Start with easier problems (dapo data probe --select 0.1 0.9), or raise sampling.responses_per_prompt."
        )
    elif has_critic:  # it gives every response an advantage of its own, mixed group or not
        return
    else:
        name, title = "low-acceptance", "Few groups are informative"
        remedy = (
            "Select problems by pass rate (dapo data probe --select 0.1 0.9), or raise sampling.responses_per_prompt."
        )
    yield Finding(
        name, WARNING, title, numbers, remedy, v.last_steps,
        ("sampling/acceptance", "sampling/groups_all_right", "sampling/groups_all_wrong"),
    )  # fmt: skip


def lone_advantage(run: RunRecord) -> str:
    """What tells the responses of a group apart that are all right or all wrong."""
    return (
        "; only the overlong punishment tells their responses apart" if is_punished(run) else " with an advantage of 0"
    )


def reward_hacking(v: Visit) -> Iterator[Finding]:
    rise = (v.last("accuracy") or 0.0) - (v.first("accuracy") or 0.0)
    shares = [(step, s["answer_only"] / s["responses"]) for step, s in v.summaries if s.get("responses")]
    numbers = ""
    if len(shares) >= 2:
        grown = shares[-1][1] - shares[0][1]
        if grown > v.t.answer_only_rise:
            (early, before), (late, now) = shares[0], shares[-1]
            numbers = f"responses with nothing but the answer: {before:.0%} in step {early}, {now:.0%} in step {late}"
    else:
        start, end = v.first("length/mean"), v.last("length/mean")
        if start and end and end < v.t.answer_only_length_ratio * start:
            numbers = f"mean length {start:.0f} tokens at the start, {end:.0f} now"
    if v.has_trend and rise > v.t.hacking_accuracy_rise and numbers:
        yield Finding(
            "answer-only",
            WARNING,
            "Accuracy rises while the working disappears",
            f"Accuracy {rise:+.3f}; {numbers}.",
            "Read the responses; audit the verdicts (dapo verify --audit RUN); can answers be guessed from prompts?",
            v.whole,
            ("accuracy", "length/mean"),
        )
    if v.summaries:
        step, summary = v.summaries[-1]
        groups = summary.get("groups", 0)
        if summary.get("top_answer") and groups >= v.t.dominating_groups:
            answer, n, references = summary["top_answer"]
            share, expected = n / summary["responses"], references / groups
            if share >= v.t.dominating_answer and expected <= v.t.dominating_reference:
                yield Finding(
                    "dominating-answer",
                    WARNING,
                    "One answer dominates",
                    f"{share:.0%} of the responses of step {step} answer {answer!r}; it is the reference of "
                    f"{expected:.0%} of their problems.",
                    "Read those responses; audit the verdicts (dapo verify --audit RUN): is it accepted wrongly?",
                    (step, step),
                    ("accuracy",),
                )


def engine_gap(v: Visit) -> Iterator[Finding]:
    gap, kl, size = v.last("engine/gap_mean"), v.last("engine/kl"), v.last("engine/effective_sample_size")
    is_wide = (gap is not None and gap > v.t.engine_gap_nats) or (kl is not None and kl > v.t.engine_kl_nats)
    if is_wide or (size is not None and size < v.t.effective_sample_size):
        parts = [
            f"mean |log π_trainer − log π_engine| {gap:.4f} nats" if gap is not None else "",
            f"KL {kl:.4f} nats" if kl is not None else "",
            f"effective sample size {size:.0%}" if size is not None else "",
        ]
        numbers = ", ".join(part for part in parts if part)
        where = ("engine/gap_mean", "engine/kl")
        if has_stale_tokens(v):
            yield Finding(
                "engine-gap",
                WARNING,
                "Trained tokens are far from the policy",
                f"{numbers}: among them are tokens of earlier weights (carried over, at most "
                f"{v.run.key('sampling', 'max_staleness_updates', default='?')} updates old), so the policy's own "
                "movement is part of it.",
                "Lower train.lr or sampling.max_staleness_updates; without carry_over and partial_rollouts the gap is "
                "the engine's alone.",
                v.last_steps,
                (*where, "sampling/staleness_max"),
            )
            return
        yield Finding(
            "engine-gap",
            SEVERE,
            "Trainer and engine disagree",
            f"{numbers}: the responses come from another policy than is trained.",
            ("" if corrects_gap(v.run) else "Set algorithm.importance_cap = 2.0; ")
            + "compare model.dtype of both; update engine and trainer together.",
            v.last_steps,
            where,
        )


def has_stale_tokens(v: Visit) -> bool:
    is_carrying = any(v.run.key("sampling", name, default=False) for name in ("carry_over", "partial_rollouts"))
    return is_carrying or bool(v.last("sampling/staleness_max"))


def corrects_gap(run: RunRecord) -> bool:
    """An importance weight, or a ratio that starts at the engine's own log-probs."""
    return is_number(run.key("algorithm", "importance_cap")) or run.key("algorithm", "old_logp") == "bypass"


def gradients(v: Visit) -> Iterator[Finding]:
    recent = [m for m in v.run.metrics[-v.t.dead_steps :] if not m.get("policy/skipped_updates")]
    tail = [one for one in v.run.series("policy/gradient_norm") if one[0] in {int(m["step"]) for m in recent}]
    if len(tail) == v.t.dead_steps and all(norm < v.t.dead_gradient_norm for _, norm in tail):
        lr = v.last("lr")
        yield Finding(
            "dead-gradients",
            SEVERE,
            "The gradients are dead",
            f"The gradient norm was below {v.t.dead_gradient_norm:g} in each of the last {v.t.dead_steps} steps "
            f"(last: {tail[-1][1]:.2g}, lr {lr if lr is not None else float('nan'):.2g}).",
            "Look at sampling/acceptance: without informative groups there is nothing to learn from.",
            (tail[0][0], tail[-1][0]),
            ("policy/gradient_norm", "sampling/acceptance"),
        )
    bad = [(step, n) for step, n in v.run.series("policy/skipped_updates") if n > 0]
    if bad:
        yield Finding(
            "non-finite-gradients",
            SEVERE,
            "Updates were skipped for non-finite gradients",
            f"{sum(n for _, n in bad):.0f} updates in {len(bad)} steps, the last in step {bad[-1][0]}.",
            'Lower train.lr; set model.dtype = "float32" to see whether it is the precision.',
            (bad[0][0], bad[-1][0]),
            ("policy/gradient_norm",),
        )


def verdicts(v: Visit) -> Iterator[Finding]:
    failed = (v.last("verdict/timeout") or 0.0) + (v.last("verdict/crash") or 0.0)
    if failed > v.t.verifier_failures:
        yield Finding(
            "verifier-failures",
            WARNING,
            "The verifier fails",
            f"{failed:.1%} of the trained responses got TIMEOUT or CRASH instead of a judgement.",
            "Raise rewards.seconds or rewards.memory_mb; see the messages in events.jsonl.",
            v.last_steps,
            ("verdict/timeout", "verdict/crash"),
        )
    unread = v.last("verdict/unparseable")
    if unread is not None and unread > v.t.unparseable:
        yield Finding(
            "unparseable",
            WARNING,
            "Many answers cannot be read",
            f"{unread:.0%} of the trained responses have no readable answer.",
            "Check that data.template asks for the form that rewards.verifier reads; look at truncation.",
            v.last_steps,
            ("verdict/unparseable",),
        )


def faults(v: Visit) -> Iterator[Finding]:
    steps = [(step, n) for step, n in v.run.series("engine/faults") if n > 0]
    exams = [(int(e["step"]), e["faults"]) for e in v.run.evaluations if is_number(e.get("faults")) and e["faults"] > 0]
    if steps or exams:
        sampled, evaluated = (sum(n for _, n in found) for found in (steps, exams))
        where = [step for step, _ in (*steps, *exams)]
        yield Finding(
            "engine-faults",
            WARNING,
            "The engine gave responses up",
            f"Their logits were not finite: {sampled:.0f} responses in {len(steps)} steps, {evaluated:.0f} in "
            f"{len(exams)} evaluations; none of them counts as right.",
            'Lower train.lr; set model.dtype = "float32" to see whether it is the precision; rollout.on_fault = "stop" '
            "ends a run at the first.",
            (min(where), max(where)),
            ("engine/faults",),
        )


def evaluations(v: Visit) -> Iterator[Finding]:
    for name in dict.fromkeys(str(e["set"]) for e in v.run.evaluations):
        lines = [e for e in v.run.evaluations if str(e["set"]) == name]
        best, last = max(lines, key=lambda e: e["avg@k"]), lines[-1]
        if last["avg@k_interval"][1] < best["avg@k_interval"][0]:
            yield Finding(
                "forgetting",
                SEVERE,
                "The evaluation has fallen",
                f"avg@{best['k']} on {name}: {best['avg@k']:.3f} after step {best['step']}, {last['avg@k']:.3f} after "
                f"step {last['step']}; their 95 % intervals do not touch.",
                "Use the better checkpoint if it is still there (checkpoint.keep); lower train.lr.",
                (int(best["step"]), int(last["step"])),
                ("accuracy", "policy/entropy"),
            )


def phases(run: RunRecord) -> dict[str, float]:
    """Seconds of the whole run by phase; what is in no phase of a step is `other`. Saving checkpoints is not timed."""
    sums = {name: sum(v for _, v in run.series(f"timing.{name}_s")) for name in ("sampling", "old_logp", "update")}
    whole = sum(value for _, value in run.series("timing.step_s"))
    sums["other"] = max(0.0, whole - sum(sums.values()))
    sums["evaluation"] = sum(float(e.get("timing.evaluation_s", 0.0)) for e in run.evaluations)
    return {name: seconds for name, seconds in sums.items() if seconds > 0} if whole else {}


BOUND = {
    "sampling": "More responses at once (rollout.max_concurrent_responses), fewer wasted groups, shorter limits.",
    "update": "Raise train.tokens_per_microbatch; switch train.gradient_checkpointing off if memory allows.",
    "old_logp": "Raise train.tokens_per_microbatch; lower train.updates_per_step (a step's first update scores its own "
    "rows).",
    "other": "Handing the weights to the engine, writing rollouts: raise rollouts.every_steps, use a faster disk.",
    "evaluation": "Raise eval.every_steps, or lower eval.k.",
}


def step_time(v: Visit) -> Iterator[Finding]:
    spent = phases(v.run)
    whole = sum(spent.values())
    if not whole:
        return
    for name, seconds in spent.items():
        limit = v.t.evaluation_time_share if name == "evaluation" else v.t.step_time_share
        if seconds / whole > limit:
            step = statistics.median(value for _, value in v.run.series("timing.step_s"))
            yield Finding(
                f"bound-by-{name.replace('_', '-')}",
                NOTE,
                f"Most time goes into {PHASES[name]}",
                f"{seconds / whole:.0%} of the run's time ({seconds:.0f} of {whole:.0f} s); a step takes {step:.1f} s.",
                BOUND[name],
                v.whole,
                ("timing.step_s",),
            )


PHASES = {
    "sampling": "sampling and verdicts",
    "old_logp": "the passes before the updates (π_old, critic, reference)",
    "update": "the updates",
    "other": "everything else",
    "evaluation": "evaluation",
}


def checkpoints(v: Visit) -> Iterator[Finding]:
    every = v.run.key("checkpoint", "every_steps", default=None)
    steps = [value for _, value in v.run.series("timing.step_s")]
    if every is None or not steps:
        return
    minutes = statistics.median(steps) * (every or max(v.run.wanted_steps, len(steps))) / 60
    hours = statistics.median(steps) * v.run.wanted_steps / 3600
    is_rare = minutes > v.t.checkpoint_minutes or (hours > 1 and every > v.t.checkpoint_run_share * v.run.wanted_steps)
    if is_rare:
        kept = f"checkpoint.every_steps = {every}" + ("" if every else " (only at the end)")
        advised = max(1, int(1800 / statistics.median(steps)))
        yield Finding(
            "rare-checkpoints",
            WARNING,
            "Checkpoints are rare",
            f"{kept}: a crash costs up to {minutes:.0f} minutes of work.",
            f"dapo resume RUN --set checkpoint.every_steps={advised} writes one about every half hour.",
            v.whole,
            ("timing.step_s",),
        )


def disk(v: Visit) -> Iterator[Finding]:
    d = v.disk
    if d is None or not d.total:
        return
    if d.free < v.t.disk_free_share * d.total or d.free < v.t.disk_checkpoints * d.checkpoint:
        yield Finding(
            "disk-full",
            SEVERE,
            "The disk is nearly full",
            f"{d.free / 2**30:.1f} GiB free of {d.total / 2**30:.0f} ({d.free / d.total:.1%}); a checkpoint takes "
            f"{d.checkpoint / 2**30:.2f} GiB.",
            "Free some room, lower checkpoint.keep, or raise rollouts.every_steps.",
        )


def stopped(v: Visit) -> Iterator[Finding]:
    if v.run.state == "stopped" and v.run.metrics:
        yield Finding(
            "stopped",
            NOTE,
            "The run has stopped before its end",
            f"{v.run.steps} of {v.run.wanted_steps} steps; nothing was written for {v.run.silent_s / 60:.0f} minutes.",
            f"dapo resume {v.run.folder}",
            (v.run.steps, v.run.steps),
        )


CHECKS: tuple[Callable[[Visit], Iterator[Finding]], ...] = (
    entropy,
    clipping,
    length,
    acceptance,
    reward_hacking,
    engine_gap,
    gradients,
    verdicts,
    faults,
    evaluations,
    step_time,
    checkpoints,
    disk,
    stopped,
)
