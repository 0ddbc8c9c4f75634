"""Partial responses: checked at submission, stored in snapshots, turned into completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.errors import EngineError
from dapo.rollout.engine import EngineState, Finished, NoiseKey, Request, concatenated
from dapo.types import Completion, StopReason


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """A request and the tokens generated for it so far."""

    request: Request
    order: int  # of submission
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    logp: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.float32))
    version: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def has_begun(self) -> bool:
        """It has tokens already, or is a later turn of an episode."""
        return len(self.tokens) > 0 or self.request.key.start > 0


def check_request(request: Request, seen: set[int], max_tokens: int) -> None:
    """Refuse a request that can never be served; the error names it."""
    name = f"request {request.id} (problem {request.key.problem!r})"
    if request.id in seen:
        raise EngineError(f"{name}: this id is in flight already.")
    if not request.prompt:
        raise EngineError(f"{name}: the prompt is empty; a response needs at least one token to follow.")
    if request.max_new_tokens < 1:
        raise EngineError(f"{name}: max_new_tokens = {request.max_new_tokens} leaves nothing to generate.")
    if len(request.prompt) + request.max_new_tokens > max_tokens:
        raise EngineError(
            f"{name}: a prompt of {len(request.prompt)} tokens and a response of up to {request.max_new_tokens} do "
            f"not fit the cache of {max_tokens} tokens a response.",
            remedy="Lower limits.max_prompt_tokens, so that such problems are dropped and counted.",
        )


def completions(items: Sequence[PartialResponse], reasons: Sequence[StopReason], tokenizer: Any) -> list[Finished]:
    """Completions of these items; their texts are decoded in one call."""
    texts = texts_of([item.tokens for item in items], tokenizer)
    return [
        (item.request, Completion(item.tokens, item.logp, item.version, reason, text))
        for item, reason, text in zip(items, reasons, texts, strict=True)
    ]


def texts_of(tokens: Sequence[NDArray[np.int32]], tokenizer: Any) -> list[str]:
    """What these tokens say. A fast tokenizer that cleans up no spaces decodes on all cores."""
    if tokenizer is None or not tokens:
        return [""] * len(tokens)
    if getattr(tokenizer, "clean_up_tokenization_spaces", True) or not getattr(tokenizer, "is_fast", False):
        return list(tokenizer.batch_decode(tokens, skip_special_tokens=True))
    return list(tokenizer.backend_tokenizer.decode_batch([each.tolist() for each in tokens], skip_special_tokens=True))


def to_state(items: Sequence[PartialResponse], logp_dtype: type, meta: Mapping[str, Any]) -> EngineState:
    """A snapshot: `meta` of the engine, and the items without their KV."""
    described = {
        **meta,
        "requests": [request_to_state(item.request) for item in items],
        "order": [item.order for item in items],
        "lengths": [len(item.tokens) for item in items],
    }
    arrays = {
        "tokens": concatenated([item.tokens for item in items], np.int32),
        "logp": concatenated([item.logp for item in items], logp_dtype),
        "token_version": concatenated([item.version for item in items], np.int32),
    }
    return EngineState(described, arrays)


def from_state(state: EngineState) -> list[PartialResponse]:
    """The items of a snapshot."""
    names = ("tokens", "logp", "token_version")
    bounds = [0, *accumulate(state.meta["lengths"])]
    parts = [slice(start, end) for start, end in pairwise(bounds)]
    return [
        PartialResponse(request_from_state(raw), order, *(state.arrays[name][part] for name in names))
        for raw, order, part in zip(state.meta["requests"], state.meta["order"], parts, strict=True)
    ]


def request_to_state(request: Request) -> dict[str, Any]:
    """A request as JSON; one that is no turn of an episode says nothing about turns."""
    raw = asdict(request)
    if not request.key.start:
        del raw["key"]["start"]
    for name in ("may_continue", "stop"):
        if not raw[name]:
            del raw[name]
    return raw


def request_from_state(raw: dict[str, Any]) -> Request:
    """A request from its JSON."""
    stop = tuple((begin, end) for begin, end in raw.get("stop", ()))
    return Request(**{**raw, "prompt": tuple(raw["prompt"]), "key": NoiseKey(**raw["key"]), "stop": stop})
