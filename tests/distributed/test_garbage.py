"""What another rank sends is checked before it is used: each kind of damage is refused, with the rank's number."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.distributed.judge import read_part
from dapo.distributed.message import Garbled, from_bytes, to_bytes
from dapo.errors import EngineError
from dapo.rollout.engine import NoiseKey, Request
from dapo.rollout.messages import Expected, decode, decode_begun, encode
from dapo.rollout.partial import PartialResponse, to_state
from dapo.rollout.stops import Stops
from dapo.types import Completion, Judgement, StopReason, Verdict
from tiny_models import tiny_tokenizer

LIMIT, VOCABULARY, EOS = 4, 50, 2


def request(number: int) -> Request:
    return Request(number, (5, 6), NoiseKey(0, "train", f"p{number}", 0, 0), LIMIT, group=number)


def expected() -> Expected:
    """Rank 1 was given requests 7 and 8, the latter with a token written already; 9 is another rank's."""
    begun = (np.array([3], np.int32), np.array([-0.5], np.float32), np.array([0], np.int32))
    running = {
        7: (1, PartialResponse(request(7), 0)),
        8: (1, PartialResponse(request(8), 1, *begun)),
        9: (0, PartialResponse(request(9), 2)),
    }
    stops = Stops(None, VOCABULARY)
    return Expected(1, running, VOCABULARY, newest_version=3, logp_dtype=np.float32, eos_ids=(EOS,), stops=stops)


def completion(tokens: list[int], reason: StopReason) -> Completion:
    n = len(tokens)
    return Completion(np.array(tokens, np.int32), np.full(n, -0.5, np.float32), np.zeros(n, np.int32), reason, "text")


def finished() -> list[tuple[Request, Completion]]:
    return [
        (request(7), completion([9, 10, 11, 12], StopReason.LENGTH)),
        (request(8), completion([3, EOS], StopReason.EOS)),
    ]


def message(change: Callable[[dict[str, Any], dict[str, Any]], None] = lambda _meta, _arrays: None) -> bytes:
    """What rank 1 sends, with something changed on the way."""
    meta, arrays = from_bytes(encode(finished(), np.float32))
    change(meta, arrays)
    return to_bytes(meta, arrays)


def test_what_is_true_passes():
    assert [number for number, _ in decode(message(), expected())] == [7, 8]


def test_a_response_may_end_with_a_string_of_its_request():
    asked = replace(request(7), stop=(("", "w9w10"),))
    claim = encode([(asked, completion([9, 10], StopReason.EOS))], np.float32)
    known = replace(expected(), running={7: (1, PartialResponse(asked, 0))}, stops=Stops(tiny_tokenizer(), VOCABULARY))
    known.stops.expect(asked)
    assert [number for number, _ in decode(claim, known)] == [7]
    with pytest.raises(EngineError, match="claims to end with an end token"):
        decode(encode([(asked, completion([10, 9], StopReason.EOS))], np.float32), known)


def put(name: str, at: int, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(meta: dict[str, Any], arrays: dict[str, Any]) -> None:
        (meta if name in meta else arrays)[name][at] = value

    return change


def swap(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(meta: dict[str, Any], arrays: dict[str, Any]) -> None:
        (meta if name in meta else arrays)[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("ids", 0, 9), "response 9 is none that it was given"),
        (put("ids", 0, 10), "response 10 is none that it was given"),
        (put("ids", 0, "7"), "response '7' is none that it was given"),
        (swap("ids", [7]), "do not belong together"),
        (put("ids", 1, 7), "does not|comes twice|claims"),
        (put("lengths", 0, 5), "lengths of 7 tokens in all come with arrays of shapes"),
        (put("lengths", 0, -4), "a length is not a count"),
        (put("lengths", 0, 1.5), "a length is not a count"),
        (swap("lengths", [5, 1]), "response 7 has 5 tokens, and was to have at most 4"),
        (put("tokens", 0, VOCABULARY), "a token outside of the vocabulary of 50"),
        (put("tokens", 0, -1), "a token outside of the vocabulary of 50"),
        (put("logp", 0, np.nan), "a log-prob that is not finite, or above 0"),
        (put("logp", 0, -np.inf), "a log-prob that is not finite, or above 0"),
        (put("logp", 0, 3.0), "a log-prob that is not finite, or above 0"),
        (put("version", 0, 4), "weights that do not exist yet"),
        (put("tokens", 4, 30), "response 8 does not begin as it was handed out"),
        (put("tokens", 5, 30), "claims to end with an end token, and has none"),
        (put("reasons", 1, "LENGTH"), "claims to be truncated at 4 tokens, and has 2"),
        (put("reasons", 1, "BORED"), "BORED"),
        (put("texts", 0, 5), "do not belong together"),
        (swap("tokens", np.zeros(6, np.int64)), "wrong type"),
        (swap("logp", np.zeros(6, np.float64)), "wrong type"),
        (swap("tokens", np.zeros((2, 3), np.int32)), "arrays of shapes"),
    ],
)
def test_what_cannot_be_true_is_refused_with_the_ranks_number(change: Any, why: str):
    with pytest.raises(EngineError, match=f"rank 1 sent responses that cannot be true: .*({why})") as raised:
        decode(message(change), expected())
    assert "dapo resume RUN" in raised.value.remedy


def test_a_missing_part_is_refused():
    with pytest.raises(EngineError, match="rank 1 sent"):
        decode(to_bytes({"ids": [7]}, {}), expected())
    with pytest.raises(EngineError, match="rank 1 sent"):
        decode(to_bytes(None, {}), expected())


@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_a_message_or_refused(data: bytes):
    with pytest.raises(Garbled):
        from_bytes(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_nothing_that_cannot_be(at: int, byte: int):
    data = bytearray(message())
    data[at % len(data)] = byte
    try:
        ended = decode(bytes(data), expected())
    except EngineError:
        return
    for number, made in ended:
        assert number in (7, 8)
        assert len(made.tokens) <= LIMIT
        assert all(0 <= token < VOCABULARY for token in made.tokens)
        assert np.isfinite(made.logp).all()


def snapshot(*items: PartialResponse) -> bytes:
    state = to_state(items, np.float32, {})
    return to_bytes(state.meta, state.arrays)


def test_a_snapshot_must_speak_of_what_was_handed_out():
    given_out = [item for rank, item in expected().running.values() if rank == 1]
    assert [item.request.id for item in decode_begun(snapshot(*given_out), expected())] == [7, 8]
    with pytest.raises(EngineError, match="reports 1 of the 2 responses"):
        decode_begun(snapshot(given_out[0]), expected())
    other = PartialResponse(Request(7, (5, 7), given_out[0].request.key, LIMIT, group=7), 0)
    with pytest.raises(EngineError, match="request 7 is not the one that was handed out"):
        decode_begun(snapshot(other, given_out[1]), expected())


def test_verdicts_must_be_those_that_were_asked_for():
    state = {"verdict": "CORRECT", "value": 1.0}
    assert read_part(1, [[3, state]], [3]) == {3: Judgement(Verdict.CORRECT, 1.0)}
    for share in ([], [[4, state]], [[3, state], [3, state]], [[3, {**state, "verdict": "FINE"}]], [[3, {}]], 7):
        with pytest.raises(EngineError, match="rank 1 sent verdicts that cannot be true"):
            read_part(1, share, [3])
    with pytest.raises(EngineError, match="not a number"):
        read_part(1, [[3, {**state, "value": "much"}]], [3])
