"""Findings about responses and rewards: length, mixed groups, reward hacking, verdicts.

A mixed group has responses with different rewards, neither all correct nor all wrong: only such a group gives a
group advantage that is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from dapo.commands import dapo_command
from dapo.report.doctor.findings import WARNING, Finding, Visit
from dapo.report.load import RunRecord


def length(v: Visit) -> Iterator[Finding]:
    start, end = v.first("length/mean"), v.last("length/mean")
    if start and end and end > v.t.length_runaway_ratio * start and not v.is_improving:
        yield Finding(
            "length-runaway",
            WARNING,
            "Responses grow without getting better",
            f"Mean length {start:.0f} tokens at the start, {end:.0f} now ({end / start:.1f} times); {v.progress}.",
            brevity(v.run),
            v.whole,
            ("length/mean", "length/p90"),
        )
    fraction = v.last("length/truncated")
    if fraction is not None and fraction > v.t.truncated:
        limit = v.run.key("limits", "max_response_tokens", default="?")
        judged = "a truncated response never counts as correct"
        if v.run.key("rewards", "truncated_may_be_correct", default=False):
            judged = "their text is verified all the same (rewards.truncated_may_be_correct)"
        yield Finding(
            "truncation",
            WARNING,
            "Many responses are truncated",
            f"{fraction:.1%} of the verified responses reached limits.max_response_tokens = {limit}; "
            f"{judged}.{aside(v)}",
            against_truncation(v),
            v.last_steps,
            ("length/truncated", "length/max", "length/correct"),
        )


def has_room(v: Visit) -> bool:
    """Right responses end far below the limit: what reaches it would not use more."""
    right, limit = v.last("length/correct"), v.run.key("limits", "max_response_tokens")
    return bool(right and limit and limit > v.t.truncated_room * right)


def aside(v: Visit) -> str:
    if not has_room(v):
        return ""
    right = v.last("length/correct")
    return (
        f" Right ones take {right:.0f} tokens, so these probably do not lack room: they repeat themselves or lose the "
        "thread."
    )


def against_truncation(v: Visit) -> str:
    if not has_room(v):
        teach = "" if is_punished(v.run) else ", or penalize length with shaping.overlong_penalty = 1.0"
        return f"Raise limits.max_response_tokens{teach}."
    otherwise = "If the longest responses are sound after all, raise limits.max_response_tokens."
    if v.run.key("shaping", "overlong_filter", default=False):
        return (
            "Set shaping.overlong_filter = false: masked, they teach nothing, and nothing pulls the policy away from "
            f"them. In two recorded runs that ended the truncation, and the score was no better. {otherwise}"
        )
    return f"Read the longest responses in the browser, and lower train.lr. {otherwise}"


def is_punished(run: RunRecord) -> bool:
    return bool(run.key("shaping", "overlong_penalty", default=0.0))


def brevity(run: RunRecord) -> str:
    """Remedies against length that are not on yet."""
    advice = []
    if not is_punished(run):
        advice.append("switch the overlong penalty on (shaping.overlong_penalty = 1.0)")
    if run.key("algorithm", "loss_aggregation") != "token":
        advice.append('use algorithm.loss_aggregation = "token"')
    if not advice:
        advice.append("lower limits.max_response_tokens or widen shaping.overlong_buffer_tokens")
    text = ", ".join([*advice, "and read the longest responses in the browser."])
    return text[0].upper() + text[1:]


def acceptance(v: Visit) -> Iterator[Finding]:
    fraction = v.last("sampling/groups_kept")
    if fraction is None or fraction >= v.t.acceptance:
        return
    right, wrong = v.last("sampling/groups_all_correct") or 0.0, v.last("sampling/groups_all_wrong") or 0.0
    equal = v.last("sampling/groups_all_equal") or 0.0  # graded rewards
    uniform = right + wrong + equal
    has_critic = v.run.key("algorithm", "advantage") == "gae"
    others = f"{right:.0f} per step were all correct and {wrong:.0f} all wrong"
    if equal:
        others = f"{equal:.0f} per step had equal rewards" + (f", {others}" if right or wrong else "")
    numbers = f"{fraction:.1%} of the groups are mixed; of the others {others}."
    if not v.run.key("sampling", "dynamic", default=True):
        numbers += f" They are trained on{'' if has_critic else lone_advantage(v.run)}."
    if uniform and right >= v.t.one_cause * uniform:
        name, title = "too-easy", "The problems are too easy now"
        remedy = "Add harder problems (dapo data probe --select 0.1 0.9), or stop: there is little left to learn here."
    elif uniform and wrong >= v.t.one_cause * uniform:
        name, title = "too-hard", "The problems are too hard"
        remedy = (
            "Start with easier problems (dapo data probe --select 0.1 0.9), or raise sampling.responses_per_prompt."
        )
    elif uniform and equal >= v.t.one_cause * uniform and not has_critic:
        name, title = "all-equal", "Most groups have equal rewards"
        remedy = "Use a finer-grained reward, other problems, or raise sampling.responses_per_prompt."
    elif has_critic:  # a critic gives every response an advantage of its own, in a mixed group or not
        return
    else:
        name, title = "few-mixed-groups", "Few groups are mixed"
        remedy = (
            "Select problems by pass rate (dapo data probe --select 0.1 0.9), or raise sampling.responses_per_prompt."
        )
    yield Finding(
        name, WARNING, title, numbers, remedy, v.last_steps,
        ("sampling/groups_kept", "sampling/groups_all_correct", "sampling/groups_all_wrong")
        + (("sampling/groups_all_equal",) if equal else ()),
    )  # fmt: skip


def lone_advantage(run: RunRecord) -> str:
    """What a group advantage makes of a group that is all correct or all wrong."""
    return (
        "; only the overlong penalty makes their advantages differ" if is_punished(run) else " with an advantage of 0"
    )


def reward_hacking(v: Visit) -> Iterator[Finding]:
    rise = (v.last("accuracy") or 0.0) - (v.first("accuracy") or 0.0)
    fractions = [(step, s["answer_only"] / s["responses"]) for step, s in v.summaries if s.get("responses")]
    numbers = ""
    if len(fractions) >= 2:
        grown = fractions[-1][1] - fractions[0][1]
        if grown > v.t.answer_only_rise:
            (early, before), (late, now) = fractions[0], fractions[-1]
            numbers = f"responses that are only an answer: {before:.0%} in step {early}, {now:.0%} in step {late}"
    else:
        start, end = v.first("length/mean"), v.last("length/mean")
        if start and end and end < v.t.answer_only_length_ratio * start:
            numbers = f"mean length {start:.0f} tokens at the start, {end:.0f} now"
    if rise > v.t.hacking_accuracy_rise and numbers:
        yield Finding(
            "answer-only",
            WARNING,
            "Accuracy rises while the reasoning disappears",
            f"Accuracy {rise:+.3f}; {numbers}.",
            f"Read the responses; audit the verdicts ({dapo_command('verify', '--audit', v.run.folder)}); can answers "
            "be guessed from the prompts?",
            v.whole,
            ("accuracy", "length/mean"),
        )
    if v.summaries:
        step, summary = v.summaries[-1]
        groups = summary.get("groups", 0)
        if summary.get("top_answer") and groups >= v.t.dominating_groups:
            answer, n, references = summary["top_answer"]
            fraction, expected = n / summary["responses"], references / groups
            if fraction >= v.t.dominating_answer and expected <= v.t.dominating_reference:
                yield Finding(
                    "dominating-answer",
                    WARNING,
                    "One answer dominates",
                    f"{fraction:.0%} of the responses of step {step} answer {answer!r}; it is the reference of "
                    f"{expected:.0%} of their problems.",
                    f"Read those responses; audit the verdicts ({dapo_command('verify', '--audit', v.run.folder)}): is "
                    "it wrongly accepted?",
                    (step, step),
                    ("accuracy",),
                )


def verdicts(v: Visit) -> Iterator[Finding]:
    failed = (v.last("verdict/timeout") or 0.0) + (v.last("verdict/crash") or 0.0)
    has_episodes = v.last_known("episode/turns") is not None  # whose failures are most likely the environment's
    if failed > v.t.verifier_failures and not has_episodes:
        yield Finding(
            "verifier-failures",
            WARNING,
            "The verifier fails often",
            f"{failed:.1%} of the trained responses got TIMEOUT or CRASH instead of a verdict.",
            "Raise rewards.cpu_seconds or rewards.memory_mb; see the messages in events.jsonl.",
            v.last_steps,
            ("verdict/timeout", "verdict/crash"),
        )
    unread = v.last("verdict/unparseable")
    if unread is not None and unread > v.t.unparseable:
        yield Finding(
            "unparseable",
            WARNING,
            "Many answers cannot be parsed",
            f"{unread:.0%} of the trained responses have no answer that can be parsed.",
            "Check that data.template asks for the format that rewards.verifier expects; look at truncation.",
            v.last_steps,
            ("verdict/unparseable",),
        )
