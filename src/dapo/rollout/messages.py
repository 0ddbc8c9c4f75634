"""Completions as ranks send them to each other. What cannot be true is refused before it is trained on.

Every rank reads the same bytes, so all refuse together, and the newest checkpoint is from before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dapo.distributed.message import Garbled, from_bytes, to_bytes
from dapo.errors import cannot_be_true
from dapo.rollout.engine import EngineState, Finished, concatenated
from dapo.rollout.partial import PartialResponse, from_state
from dapo.rollout.stops import Stops
from dapo.types import Completion, StopReason

ARRAYS = ("tokens", "logp", "version")
LOGP_SLACK = 1e-2  # a log-prob of 0 may come out a little above it


@dataclass(frozen=True, slots=True)
class Expected:
    """What a message of one rank can be about."""

    rank: int
    running: Mapping[int, tuple[int, PartialResponse]]  # request id -> (rank, as it was handed out)
    n_vocabulary: int
    newest_version: int
    logp_dtype: type
    eos_ids: tuple[int, ...]
    stops: Stops

    def handed(self, number: Any) -> PartialResponse:
        """The request that rank was given under this id."""
        rank, item = self.running.get(number, (None, None)) if type(number) is int else (None, None)
        if item is None or rank != self.rank:
            raise Garbled(f"response {number!r} is none that it was given")
        return item


T = TypeVar("T")


def encode(finished: Sequence[Finished], logp_dtype: type) -> bytes:
    completions = [completion for _, completion in finished]
    meta = {
        "ids": [request.id for request, _ in finished],
        "lengths": [len(completion.tokens) for completion in completions],
        "reasons": [completion.stop_reason.value for completion in completions],
        "texts": [completion.text for completion in completions],
    }
    kinds: tuple[Any, ...] = (np.int32, logp_dtype, np.int32)
    arrays = {
        name: concatenated([getattr(completion, name) for completion in completions], kind)
        for name, kind in zip(ARRAYS, kinds, strict=True)
    }
    return to_bytes(meta, arrays)


def decode(data: bytes, expected: Expected) -> list[tuple[int, Completion]]:
    """(request id, completion) of all that ended on that rank."""

    def read() -> list[tuple[int, Completion]]:
        meta, arrays = from_bytes(data)
        ids, lengths, reasons, texts = (list(meta[name]) for name in ("ids", "lengths", "reasons", "texts"))
        if not len(ids) == len(lengths) == len(reasons) == len(texts) or not all(isinstance(t, str) for t in texts):
            raise Garbled("its lists do not belong together")
        tokens, logp, version = (arrays[name] for name in ARRAYS)
        items = []
        for i, part in enumerate(slices(lengths, tokens, logp, version)):
            completion = Completion(tokens[part], logp[part], version[part], StopReason(reasons[i]), texts[i])
            check(ids[i], completion, expected)
            items.append((ids[i], completion))
        refuse_twice(ids)
        return items

    return named(expected.rank, read)


def decode_begun(data: bytes, expected: Expected) -> list[PartialResponse]:
    """What that rank has begun and not ended, from its engine's snapshot."""

    def read() -> list[PartialResponse]:
        items = from_state(EngineState(*from_bytes(data)))
        for item in items:
            check(item.request.id, Completion(item.tokens, item.logp, item.version, StopReason.ABORTED, ""), expected)
            handed = expected.handed(item.request.id)
            if (item.request, item.order) != (handed.request, handed.order):
                raise Garbled(f"request {item.request.id} is not the one that was handed out")
        refuse_twice([item.request.id for item in items])
        n = sum(rank == expected.rank for rank, _ in expected.running.values())
        if len(items) != n:
            raise Garbled(f"it reports {len(items)} of the {n} responses it was given")
        return items

    return named(expected.rank, read)


def named(rank: int, read: Callable[[], T]) -> T:
    """What was read; or an error that names the rank."""
    try:
        return read()
    except (Garbled, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = str(error) if isinstance(error, Garbled) else f"{type(error).__name__}: {error}"
        raise cannot_be_true(rank, "responses", why) from None


def slices(lengths: Sequence[int], *arrays: NDArray[Any]) -> list[slice]:
    if not all(type(n) is int and n >= 0 for n in lengths):
        raise Garbled("a length is not a count")
    if any(array.shape != (sum(lengths),) for array in arrays):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise Garbled(f"lengths of {sum(lengths)} tokens in all come with arrays of shapes {shapes}")
    return [slice(start, end) for start, end in pairwise([0, *accumulate(lengths)])]


def refuse_twice(ids: Sequence[int]) -> None:
    if len(set(ids)) != len(ids):
        raise Garbled("a response comes twice")


def check(number: Any, completion: Completion, expected: Expected) -> None:
    """Refuse a completion that the rank's engine cannot have generated."""
    item = expected.handed(number)
    tokens, logp, version = completion.tokens, completion.logp, completion.version
    kinds = [np.dtype(kind) for kind in (np.int32, expected.logp_dtype, np.int32)]
    if [tokens.dtype, logp.dtype, version.dtype] != kinds:
        raise Garbled(f"response {number} has tokens, log-probs and versions of the wrong type")
    n, limit = len(tokens), item.request.max_new_tokens
    if n > limit:
        raise Garbled(f"response {number} has {n} tokens, and was to have at most {limit}")
    if n and not 0 <= tokens.min() <= tokens.max() < expected.n_vocabulary:
        raise Garbled(f"response {number} has a token outside of the vocabulary of {expected.n_vocabulary}")
    if not np.isfinite(logp).all() or (n and logp.max() > LOGP_SLACK):
        raise Garbled(f"response {number} has a log-prob that is not finite, or above 0")
    if n and not 0 <= version.min() <= version.max() <= expected.newest_version:
        raise Garbled(f"response {number} has a token of weights that do not exist yet")
    for name in ARRAYS:
        before, after = getattr(item, name), getattr(completion, name)
        if not np.array_equal(after[: len(before)], before):
            raise Garbled(f"response {number} does not begin as it was handed out")
    is_at_end = n > 0 and (
        int(tokens[-1]) in expected.eos_ids or expected.stops.end(item.request, tokens, n - 1) is not None
    )
    if completion.stop_reason is StopReason.EOS and not is_at_end:
        raise Garbled(f"response {number} claims to end with an end token, and has none")
    if completion.stop_reason is StopReason.LENGTH and n != limit:
        raise Garbled(f"response {number} claims to be truncated at {limit} tokens, and has {n}")
