"""JSON and arrays as bytes: the messages between ranks. Nothing in a message can be executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH_BYTES = 8


class Garbled(Exception):
    """A corrupt message. The caller, who knows the sender, names it."""


def to_bytes(meta: Any, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    head = json.dumps({"meta": meta, "arrays": described}, ensure_ascii=False).encode()
    parts = [len(head).to_bytes(LENGTH_BYTES, "little"), head]
    return b"".join([*parts, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])


def from_bytes(data: bytes) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Raises `Garbled` on anything that `to_bytes` did not make."""
    at = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) < at or at < LENGTH_BYTES:
        raise Garbled(f"a message of {len(data)} bytes is shorter than its own head")
    try:
        head = json.loads(data[LENGTH_BYTES:at])
        described = [(str(name), np.dtype(kind), tuple(map(int, shape))) for name, kind, shape in head["arrays"]]
        meta = head["meta"]
    except (ValueError, TypeError, KeyError) as error:
        raise Garbled(f"the head of a message cannot be read: {error}") from None
    arrays = {}
    for name, dtype, shape in described:
        n = prod(shape)
        if dtype.kind not in "biuf" or min(shape, default=0) < 0 or at + n * dtype.itemsize > len(data):
            raise Garbled(f"array {name} of type {dtype} and shape {shape} is not what follows")
        arrays[name] = np.frombuffer(data, dtype, n, at).reshape(shape).copy()
        at += n * dtype.itemsize
    if at != len(data):
        raise Garbled(f"{len(data) - at} bytes are left over")
    return meta, arrays
