"""The questions a newcomer asks about a run, each answered in a sentence from its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.errors import DataError
from dapo.report.doctor.findings import Finding
from dapo.report.doctor.run import PHASES, time_fractions
from dapo.report.evidence import too_few_steps
from dapo.report.forecast import LEAST, curve_of, forecast, target_step
from dapo.report.learning import IMPROVED, WORSE, change_of
from dapo.report.ledger import FATES, TRAINED, Row, balance_of_run, has_ledger, rows_of
from dapo.report.load import RunRecord
from dapo.report.parts import parts_of

GOOD, BAD, PLAIN = "good", "bad", "plain"

CAUSES = {
    "all_wrong": "all wrong",
    "all_correct": "all correct",
    "all_equal": "all equal",
    "truncated": "truncated",
    "surplus": "surplus",
    "aborted": "aborted",
    "stale": "stale",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its short answer, the numbers behind it, and, where there are any, fractions that add up to 1."""

    name: str
    question: str
    answer: str
    detail: str
    tone: str = PLAIN
    fractions: list[tuple[str, float]] = field(default_factory=list)


def answer_all(
    run: RunRecord,
    findings: Sequence[Finding],
    summaries: Sequence[tuple[int, Mapping[str, Any]]],
    flips: Sequence[Mapping[str, Any]],
) -> list[Answer]:
    """Did it learn, did entropy collapse, why is it slow, what was clipped, what was wasted, what flipped; and where
    it will end, where it was evaluated, and where the prompts went, where it has a ledger."""
    answers = [
        learnt(run),
        collapsed(run, findings),
        slow(run),
        clipped(run, summaries),
        wasted(run),
        flipped(run, flips),
    ]
    if (end := ends(run)) is not None:
        answers.append(end)
    if has_ledger(run.folder):
        answers.append(went(run))
    return answers if len(parts_of(run)) < 2 else [*answers, decided(run)]


def learnt(run: RunRecord) -> Answer:
    question = "Did it learn?"
    change = change_of(run)
    if change is not None:
        moved = f"{change.score} {change.before:.3f} → {change.after:.3f}"
        tone = {IMPROVED: GOOD, WORSE: BAD}.get(change.verdict, PLAIN)
        return Answer("learnt", question, change.verdict.capitalize(), f"{moved}; {change.why}.", tone)
    accuracy = run.series("accuracy")
    also = f" Accuracy while training: {accuracy[0][1]:.3f} → {accuracy[-1][1]:.3f}." if len(accuracy) >= 2 else ""
    if run.is_never_evaluated:
        return Answer("learnt", question, "Not evaluated", f"The run has no evaluations.{also}")
    if run.state == "running":
        return Answer("learnt", question, "Too early to tell", f"There are no two evaluations yet.{also}")
    return Answer(
        "learnt", question, "Not measured", f"The run was not evaluated both before and after training.{also}"
    )


def ends(run: RunRecord) -> Answer | None:
    """A forecast from the evaluations so far; None where too few are to come, or rewards are graded."""
    curve, has_ended = curve_of(run), run.steps >= run.wanted_steps
    if curve is None or len(curve) < 2 or (has_ended and len(curve) < LEAST):
        return None
    step = target_step(run)
    question = "Would more steps help?" if has_ended else "Where will it end?"
    if len(curve) < LEAST:
        return Answer(
            "forecast", question, "Too early to tell", f"A forecast needs {LEAST} evaluations; there are {len(curve)}."
        )
    (end,) = forecast(curve, [step])
    detail = (
        f"95 % interval {end.low:.2f} to {end.high:.2f}; now {curve.scores[-1]:.2f}. By a saturating curve through "
        f"{len(curve)} evaluations: it knows of no collapse to come."
    )
    return Answer("forecast", question, f"About {end.value:.2f} at step {step:,}", detail)


def collapsed(run: RunRecord, findings: Sequence[Finding]) -> Answer:
    question = "Did entropy collapse?"
    series = run.series("policy/entropy")
    if not series:
        return Answer("entropy", question, "Not measured", "No step has logged entropy yet.")
    for finding in findings:
        if finding.name.startswith("entropy-"):
            answer = "Yes" if finding.name == "entropy-collapse" else "No, it is exploding"
            return Answer("entropy", question, answer, finding.detail, BAD)
    detail = f"{series[0][1]:.3f} → {series[-1][1]:.3f} nats per token"
    if reason := too_few_steps(len(run.metrics)):
        return Answer("entropy", question, "Not enough steps", f"{detail}: {reason}.")
    accuracy = run.series("accuracy")
    if series[-1][1] < series[0][1] / 2 and len(accuracy) > 1:
        moved = f"({accuracy[0][1]:.2f} → {accuracy[-1][1]:.2f})"
        if accuracy[-1][1] <= accuracy[0][1]:
            return Answer("entropy", question, "Not yet", f"{detail}: more certain, but not more accurate {moved}.")
        detail += f": more certain, and more accurate {moved}"
    return Answer("entropy", question, "No", f"{detail}.", GOOD)


def slow(run: RunRecord) -> Answer:
    question = "Where does the time go?"
    fractions = [(PHASES[name], fraction) for name, _, fraction in time_fractions(run)]
    if not fractions:
        return Answer("time", question, "Not measured", "No step has logged timings yet.")
    step = statistics.median(value for _, value in run.series("timing.step_s"))
    tokens = sum(value for _, value in run.series("tokens/generated"))
    seconds = sum(value for _, value in run.series("timing.step_s"))
    rest = in_percent(fractions[1:])
    pace = f"{step:.1f} s per step" + (f", {tokens / seconds:,.0f} generated tokens per second" if seconds else "")
    detail = (f"Then {rest}. " if rest else "") + f"{pace}."
    return Answer("time", question, f"{fractions[0][0].capitalize()}, {fractions[0][1]:.0%}", detail, PLAIN, fractions)


def in_percent(fractions: Sequence[tuple[str, float]]) -> str:
    """All that are not 0 % in print, so that they add up."""
    return ", ".join(f"{name} {fraction:.0%}" for name, fraction in fractions if fraction >= 0.005)


def clipped(run: RunRecord, summaries: Sequence[tuple[int, Mapping[str, Any]]]) -> Answer:
    question = "Which tokens were clipped?"
    low, high = run.series("clip/low"), run.series("clip/high")
    if not low or not high:
        return Answer("clipped", question, "Not measured", "No step has logged clip fractions yet.")
    clipped = f"{statistics.fmean(v for _, v in low):.2%} low, {statistics.fmean(v for _, v in high):.2%} high"
    counts: dict[str, int] = {}
    for _, summary in summaries:
        for token, n in [*summary.get("clipped_low", ()), *summary.get("clipped_high", ())]:
            counts[token] = counts.get(token, 0) + n
    often = sorted(counts, key=lambda token: -counts[token])[:4]
    detail = "Most often " + ", ".join(repr(token) for token in often) + "." if often else "None in the recorded steps."
    return Answer("clipped", question, clipped, detail)


def wasted(run: RunRecord) -> Answer:
    question = "Which tokens were wasted, and why?"
    generated = sum(value for _, value in run.series("tokens/generated"))
    if not generated:
        return Answer("waste", question, "Not measured", "No step has logged token counts yet.")
    fractions = [
        (label, sum(value for _, value in run.series(f"tokens/wasted_{cause}")) / generated)
        for cause, label in CAUSES.items()
    ]
    fractions = sorted((fraction for fraction in fractions if fraction[1] > 0), key=lambda fraction: -fraction[1])
    lost = sum(fraction for _, fraction in fractions)
    causes = in_percent(fractions)
    detail = f"Of {generated:,.0f} generated tokens" + (f": {causes}." if causes else " all were trained on.")
    return Answer("waste", question, f"{lost:.0%} of the tokens", detail, PLAIN, [("trained on", 1 - lost), *fractions])


def went(run: RunRecord) -> Answer:
    """Every group sampled, by its fate; kept against dropped lengths show whether long responses are dropped."""
    question = "Where did the prompts go?"
    try:
        found = balance_of_run(run.folder, skips_visits=run.skips_visits, metrics=run.metrics)
    except DataError as error:
        return Answer("prompts", question, "Cannot be read", error.message, BAD)
    if found.faults:
        return Answer("prompts", question, "Some were lost or used twice", " ".join(found.faults[:3]), BAD)
    rows = rows_of(found)
    total = sum(row.groups for row in rows)
    if not total:
        return Answer("prompts", question, "Not measured", "No step has sampled a group yet.")
    detail = f"{total:,} groups, each accounted for once: "
    detail += "; ".join(f"{FATES[row.fate]} {row.groups:,}{length_of(row)}" for row in rows) + "."
    fractions = [(FATES[row.fate], row.groups / total) for row in rows]
    trained = next((row.groups for row in rows if row.fate == TRAINED), 0)
    return Answer("prompts", question, f"{trained / total:.0%} trained on", detail, PLAIN, fractions)


def length_of(row: Row) -> str:
    return "" if row.tokens is None else f" ({row.tokens:,.0f} tokens per response)"


def decided(run: RunRecord) -> Answer:
    """For a reward in parts: how much of the advantages is due to each, and how each has moved."""
    question = "Which part of the reward decides?"
    moved, shares = [], []
    for name, weight in parts_of(run):
        series = run.series(f"reward/part/{name}/mean")
        share = run.median(f"reward/part/{name}/share", slice(-20, None))
        if share is not None:
            shares.append((name, share))
        if series:
            how = "recorded only" if weight is None else f"weight {weight:g}"
            moved.append(f"{name} ({how}) {series[0][1]:.3f} → {series[-1][1]:.3f}")
    detail = f"Means before their weights: {', '.join(moved)}."
    if not shares:
        return Answer("parts", question, "Not measured", detail)
    answer = ", ".join(
        f"{name} {round(100 * share)}%" for name, share in sorted(shares, key=lambda share: -share[1])[:3]
    )
    drawn = [(name, max(0.0, share)) for name, share in shares]
    total = sum(share for _, share in drawn) or 1.0
    detail = f"Shares of the advantages' variance. {detail}"
    return Answer("parts", question, answer, detail, PLAIN, [(name, share / total) for name, share in drawn])


def flipped(run: RunRecord, flips: Sequence[Mapping[str, Any]]) -> Answer:
    question = "Which problems flipped?"
    if not flips:
        why = "One evaluation is not enough." if run.evaluations else "Nothing has been evaluated yet."
        return Answer("flips", question, "None known", why)
    up = [flip for flip in flips if flip["change"] >= 0.5]
    down = [flip for flip in flips if flip["change"] <= -0.5]
    detail = f"Of {len(flips)} held-out problems: the share of correct responses rose, or fell, by 50 points or more."
    counts = [("learned", len(up)), ("little changed", len(flips) - len(up) - len(down)), ("lost", len(down))]
    fractions = [(label, n / len(flips)) for label, n in counts]
    tone = BAD if len(down) > len(up) else PLAIN
    return Answer("flips", question, f"{len(up)} learned, {len(down)} lost", detail, tone, fractions)


def flips_of(run: RunRecord) -> list[dict[str, Any]]:
    """Every problem of the first evaluation set with its correct responses over the steps, most changed first."""
    lines = [line for line in run.eval_problems if line["set"] == run.eval_problems[0]["set"]]
    if len(lines) < 2:
        return []
    over: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name, question, correct in zip(line["ids"], line["questions"], line["correct"], strict=False):
            entry = over.setdefault(
                name, {"id": name, "question": question, "k": line["k"], "steps": [], "correct": []}
            )
            entry["steps"].append(line["step"])
            entry["correct"].append(correct)
    for entry in over.values():
        entry["change"] = (entry["correct"][-1] - entry["correct"][0]) / max(1, entry["k"])
    return sorted(over.values(), key=lambda entry: -abs(entry["change"]))
