"""Groups, complete or in flight, in a checkpoint: tokens as tensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dapo.rollout.engine import EngineState
from dapo.rollout.partial import request_from_state
from dapo.sampling.collect import Collector, PendingGroup
from dapo.types import Completion, EpisodeRecord, Group, Judgement, Problem, StopReason, Verdict

Tensors = dict[str, Tensor]


def completion_to_state(completion: Completion, name: str) -> tuple[dict[str, Any], Tensors]:
    tensors = {
        f"{name}.tokens": torch.from_numpy(completion.tokens),
        f"{name}.logp": torch.from_numpy(completion.logp),
        f"{name}.version": torch.from_numpy(completion.version),
    }
    state: dict[str, Any] = {"stop_reason": completion.stop_reason.value, "text": completion.text}
    if completion.own is not None:
        tensors[f"{name}.own"] = torch.from_numpy(completion.own)
    if completion.episode is not None:
        state["episode"] = asdict(completion.episode)
    return state, tensors


def completion_from_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Completion:
    return Completion(
        tensors[f"{name}.tokens"].numpy(),
        tensors[f"{name}.logp"].numpy(),
        tensors[f"{name}.version"].numpy(),
        StopReason(state["stop_reason"]),
        state["text"],
        tensors[f"{name}.own"].numpy() if f"{name}.own" in tensors else None,
        episode_from_state(state["episode"]) if "episode" in state else None,
    )


def episode_from_state(state: Mapping[str, Any]) -> EpisodeRecord:
    judged = state["judgement"]
    return EpisodeRecord(**{**state, "judgement": None if judged is None else judgement_from_state(judged)})


def judgement_to_state(judgement: Judgement) -> dict[str, Any]:
    return asdict(judgement)


def judgement_from_state(state: Mapping[str, Any]) -> Judgement:
    return Judgement(**{**state, "verdict": Verdict(state["verdict"])})


def groups_to_state(groups: Sequence[Group], prefix: str) -> tuple[list[dict[str, Any]], Tensors]:
    """(JSON, tensors) of finished groups."""
    state: list[dict[str, Any]] = []
    tensors: Tensors = {}
    for g, group in enumerate(groups):
        completions = []
        for i, completion in enumerate(group.completions):
            saved, arrays = completion_to_state(completion, f"{prefix}.{g}.{i}")
            completions.append(saved)
            tensors |= arrays
        state.append(
            {
                "problem": group.problem.id,
                "visit": group.visit,
                "prompt": list(group.prompt_tokens),
                "completions": completions,
                "judgements": [judgement_to_state(judgement) for judgement in group.judgements],
            }
        )
    return state, tensors


def groups_from_state(
    state: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], problems: Mapping[str, Problem], prefix: str
) -> list[Group]:
    return [
        Group(
            problems[saved["problem"]],
            saved["visit"],
            tuple(saved["prompt"]),
            tuple(
                completion_from_state(completion, tensors, f"{prefix}.{g}.{i}")
                for i, completion in enumerate(saved["completions"])
            ),
            tuple(judgement_from_state(judgement) for judgement in saved["judgements"]),
        )
        for g, saved in enumerate(state)
    ]


def collector_to_state(collector: Collector) -> tuple[dict[str, Any], Tensors]:
    """Everything in flight: the engine's sequences, what has ended of each group, and which verdicts are due when."""
    engine = collector.engine.snapshot()
    tensors: Tensors = {f"engine.{name}": torch.from_numpy(array) for name, array in engine.arrays.items()}
    groups = []
    for group in collector.groups.values():
        completions: list[dict[str, Any] | None] = []
        for i, completion in enumerate(group.completions):
            saved = None
            if completion is not None:
                saved, arrays = completion_to_state(completion, f"pending.{group.number}.{i}")
                tensors |= arrays
            completions.append(saved)
        groups.append(
            {
                "number": group.number,
                "overtaken": group.overtaken,
                "problem": group.problem.id,
                "visit": group.visit,
                "prompt": list(group.prompt),
                "completions": completions,
                "judgements": [None if j is None else judgement_to_state(j) for j in group.judgements],
            }
        )
    due = [[entry.tick, entry.request.group, entry.request.key.response_index] for entry in collector.due]
    state = {
        "engine": dict(engine.meta),
        "tick": collector.engine.tick,
        "n_submitted": collector.n_submitted,
        "groups": groups,
        "due": due,
    }
    return state, tensors


def collector_from_state(
    collector: Collector, state: Mapping[str, Any], tensors: Mapping[str, Tensor], problems: Mapping[str, Problem]
) -> list[PendingGroup]:
    """Put everything back in flight; responses whose verdict was due are verified again. The weights must be loaded."""
    arrays = {n.removeprefix("engine."): t.numpy() for n, t in tensors.items() if n.startswith("engine.")}
    collector.engine.restore(EngineState(state["engine"], arrays))
    collector.engine.tick = state["tick"]
    collector.n_submitted = state["n_submitted"]
    for saved in state["groups"]:
        number = saved["number"]
        group = PendingGroup(
            number,
            problems[saved["problem"]],
            saved["visit"],
            tuple(saved["prompt"]),
            [
                None if c is None else completion_from_state(c, tensors, f"pending.{number}.{i}")
                for i, c in enumerate(saved["completions"])
            ],
            [None] * len(saved["judgements"]),
            overtaken=saved.get("overtaken", 0),  # older checkpoints did not count
        )
        for i, judgement in enumerate(saved["judgements"]):
            if judgement is not None:
                group.add_verdict(i, judgement_from_state(judgement))
        collector.groups[number] = group
    check_in_flight(collector, state)
    for tick, number, index in state["due"]:
        collector.await_verdict(tick, collector.groups[number], index)
    return list(collector.groups.values())


def check_in_flight(collector: Collector, state: Mapping[str, Any]) -> None:
    """Each response of an open group is in the engine, waits for its verdict, or has one: else it would never end."""
    places = [
        (group, i, completion, judgement)
        for group in collector.groups.values()
        for i, (completion, judgement) in enumerate(zip(group.completions, group.judgements, strict=True))
    ]
    unfinished = {collector.request_of(group, i) for group, i, completion, _ in places if completion is None}
    unjudged = [[group.number, i] for group, i, completion, judged in places if completion is not None and not judged]
    if unfinished != {request_from_state(raw) for raw in state["engine"]["requests"]}:
        raise ValueError("sampling.in_flight: the requests of the engine are not those of its groups")
    if sorted(unjudged) != sorted([number, index] for _, number, index in state["due"]):
        raise ValueError("sampling.in_flight.due: not the responses without a verdict")
