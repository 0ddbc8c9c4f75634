"""Findings about episodes of several turns: an environment that is slow, that fails, or that the model does not use."""

from __future__ import annotations

from collections.abc import Iterator

from dapo.commands import dapo_command
from dapo.report.doctor.findings import NOTE, WARNING, Finding, Visit

WITH_TOOLS = ("python", "calculator")  # of ours; another one is known by its first call


def episodes(v: Visit) -> Iterator[Finding]:
    """A run without an environment has no such metrics."""
    if v.last_known("episode/turns") is not None:
        yield from slow(v)
        yield from failing(v)
        yield from unused(v)


def name_of(v: Visit) -> str:
    name = v.run.key("data", "environment", default="none")
    return "its environment" if name in (None, "none") else f"environment {name}"


def slow(v: Visit) -> Iterator[Finding]:
    waited, rollout = v.last("timing.environments_s"), v.last("timing.rollout_s")
    if waited is None or not rollout or waited <= v.t.environment_waiting * rollout:
        return
    yield Finding(
        "slow-environment",
        WARNING,
        "The rollout waits for the environment",
        f"Nothing went on for {waited:.1f} of {rollout:.1f} s of a step's rollout ({waited / rollout:.0%}), for want "
        f"of answers of {name_of(v)}.",
        "Raise the class's answer_after_ticks, so that others decode meanwhile (it changes the run: for a new one); "
        "for an environment that sleeps raise rewards.workers too, or sampling.prompts_per_step.",
        v.last_steps,
        ("timing.environments_s", "timing.rollout_s"),
    )


def failing(v: Visit) -> Iterator[Finding]:
    died = (v.last("verdict/timeout") or 0.0) + (v.last("verdict/crash") or 0.0)
    if died > v.t.verifier_failures:
        yield Finding(
            "environment-failures",
            WARNING,
            "The environment fails often",
            f"{died:.1%} of the trained episodes ended as TIMEOUT or CRASH, by {name_of(v)} or the verifier.",
            "Read their messages in the rollout browser; raise rewards.cpu_seconds or rewards.memory_mb where they "
            f"say so; try it by hand: {dapo_command('play', v.run.folder, '--you')}.",
            v.last_steps,
            ("verdict/timeout", "verdict/crash"),
        )
    failed, calls = v.last_known("episode/tool_failures"), v.last("episode/tool_calls")
    if failed is not None and failed > v.t.tool_failures and calls:
        yield Finding(
            "failing-calls",
            WARNING,
            "Most tool calls fail",
            f"{failed:.0%} of the tool calls failed, of {calls:.2f} in an episode.",
            f"See how they fail: {dapo_command('play', v.run.folder)}. Does the prompt say the format, and does the "
            "tool accept what the model writes?",
            v.last_steps,
            ("episode/tool_failures", "episode/tool_calls"),
        )


def unused(v: Visit) -> Iterator[Finding]:
    """One turn in every episode, or no call of a tool that there is. A model that is right without it may do so."""
    turns, calls = v.last_known("episode/turns") or 0.0, v.last_known("episode/tool_calls") or 0.0
    has_tools = v.run.key("data", "environment") in WITH_TOOLS or any(
        value > 0 for _, value in v.run.series("episode/tool_calls")
    )
    is_idle = has_tools and calls < v.t.tool_calls
    if turns >= 1 + v.t.tool_calls and not is_idle:
        return
    accuracy = v.last("accuracy")
    is_right = accuracy is not None and accuracy >= v.t.entropy_excused_accuracy
    yield Finding(
        "unused-environment",
        NOTE if is_right else WARNING,
        "The model does not use its tools" if is_idle else "Episodes end after their first turn",
        f"{turns:.2f} turns and {calls:.2f} tool calls in an episode, with {name_of(v)}"
        + (f"; accuracy {accuracy:.2f}." if accuracy is not None else "."),
        f"See what the model writes: {dapo_command('play', v.run.folder)}. Say in the prompt how the environment is "
        "used; a model that never does gets no reward for it: begin with one that sometimes does.",
        v.last_steps,
        ("episode/turns", "episode/tool_calls"),
    )
