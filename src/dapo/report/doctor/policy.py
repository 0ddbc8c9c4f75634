"""Findings about the policy: entropy, clipping, the engine's log-probs, gradients."""

from __future__ import annotations

from collections.abc import Iterator

from dapo.report.doctor.findings import SEVERE, WARNING, Finding, Visit
from dapo.report.load import RunRecord, is_number


def entropy(v: Visit) -> Iterator[Finding]:
    start, end = v.first("policy/entropy"), v.last("policy/entropy")
    if start is None or end is None:
        return
    is_excused = (v.last("accuracy") or 0.0) >= v.t.entropy_excused_accuracy
    if (end < v.t.entropy_collapse_ratio * start and v.is_stuck) or (
        end < v.t.entropy_collapse_nats and not is_excused
    ):
        progress = v.progress
        is_graded = progress is not None and not progress.is_accuracy
        told = "" if progress is None else f"; {progress}"
        yield Finding(
            "entropy-collapse",
            WARNING if is_graded else SEVERE,
            "Entropy has collapsed",
            f"{start:.3f} nats at the start, {end:.4f} now{ratio_of(end, start)}{told}: the model has stopped exploring"
            f"{'' if is_graded else ' before it was accurate'}.",
            "Raise algorithm.clip.high (the paper: 0.28), lower train.lr, or go back to an earlier checkpoint.",
            v.whole,
            ("policy/entropy", "policy/probability", "clip/high"),
        )
    if end > v.t.entropy_explosion_ratio * start and end - start > v.t.entropy_explosion_rise:
        yield Finding(
            "entropy-explosion",
            SEVERE,
            "Entropy is exploding",
            f"{start:.3f} nats at the start, {end:.3f} now{ratio_of(end, start)}: responses are turning into noise.",
            "Lower train.lr or algorithm.clip.high; look at the truncated share and at the engine gap.",
            v.whole,
            ("policy/entropy", "length/truncated", "engine/gap_mean"),
        )


def ratio_of(end: float, start: float) -> str:
    """The end as a fraction of the start; empty where the start was 0."""
    return f" ({end / start:.0%})" if start else ""


def clipping(v: Visit) -> Iterator[Finding]:
    low, high = v.last("clip/low"), v.last("clip/high")
    if low is None or high is None:
        return
    heavy, light = max(low, high), min(low, high)
    if heavy < v.t.clip_fraction or heavy < v.t.clip_asymmetry * light:
        return
    side, other = ("high", "low") if high > low else ("low", "high")
    if side == "high":
        why = "positive-advantage tokens are clipped at 1 + ε_high, so unlikely tokens cannot gain probability"
        remedy = "Raise algorithm.clip.high, or lower train.lr."
    else:
        why = "negative-advantage tokens are clipped at 1 − ε_low, so wrong tokens lose probability slowly"
        remedy = "Lower train.lr or train.updates_per_step; keep algorithm.clip.low (raising it costs exploration)."
    yield Finding(
        "one-sided-clipping",
        WARNING,
        f"Clipping is one-sided ({side})",
        f"{heavy:.2%} of tokens are clipped {side}, {light:.3%} {other}: {why}.",
        remedy,
        v.last_steps,
        ("clip/low", "clip/high"),
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
                "Trained tokens are off-policy",
                f"{numbers}: some tokens were sampled by earlier weights (at most "
                f"{v.run.key('sampling', 'max_staleness_updates', default='?')} updates old), so the updates "
                "in between are part of the gap.",
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
            f"{numbers}: the responses come from a different policy than the one being trained.",
            ("" if corrects_gap(v.run) else "Set algorithm.correction.cap = 2.0; ")
            + "compare model.dtype of both; update engine and trainer together.",
            v.last_steps,
            where,
        )


def has_stale_tokens(v: Visit) -> bool:
    is_carrying = any(v.run.key("sampling", name, default=False) for name in ("carry_over", "partial_rollouts"))
    return is_carrying or bool(v.last("sampling/staleness_max"))


def corrects_gap(run: RunRecord) -> bool:
    """Importance weights, or a ratio against the engine's own log-probs."""
    return is_number(run.key("algorithm", "correction", "cap")) or run.key("algorithm", "old_logp") == "bypass"


def dead_gradients(v: Visit) -> Iterator[Finding]:
    recent = [m for m in v.run.metrics[-v.t.dead_steps :] if not m.get("policy/skipped_updates")]
    tail = [one for one in v.run.series("policy/grad_norm") if one[0] in {int(m["step"]) for m in recent}]
    if len(tail) == v.t.dead_steps and all(norm < v.t.dead_gradient_norm for _, norm in tail):
        lr = v.last("lr")
        imitates = v.run.key("algorithm", "advantage") == "none" and v.run.key("algorithm", "positive_nll") != 0
        yield Finding(
            "dead-gradients",
            SEVERE,
            "Gradients are zero",
            f"The gradient norm was below {v.t.dead_gradient_norm:g} in each of the last {v.t.dead_steps} steps "
            f"(last: {tail[-1][1]:.2g}, lr {lr if lr is not None else float('nan'):.2g}).",
            "Look at accuracy: only correct responses are imitated, and a graded verifier has to say which are "
            "(Score.correct). Or train with a policy gradient: preset dapo."
            if imitates
            else "Look at sampling/groups_kept: without mixed groups every advantage is 0.",
            (tail[0][0], tail[-1][0]),
            ("policy/grad_norm", "accuracy" if imitates else "sampling/groups_kept"),
        )


def skipped_updates(v: Visit) -> Iterator[Finding]:
    bad = [(step, n) for step, n in v.run.series("policy/skipped_updates") if n > 0]
    if bad:
        yield Finding(
            "non-finite-gradients",
            SEVERE,
            "Updates were skipped for non-finite gradients",
            f"{sum(n for _, n in bad):.0f} updates in {len(bad)} steps, the last in step {bad[-1][0]}.",
            'Lower train.lr; set model.dtype = "float32" to rule out precision.',
            (bad[0][0], bad[-1][0]),
            ("policy/grad_norm",),
        )
