"""JSON and arrays as bytes, for what ranks tell each other. Nothing in a message can be executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH_BYTES = 8


def to_bytes(meta: Any, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    head = json.dumps({"meta": meta, "arrays": described}, ensure_ascii=False).encode()
    parts = [len(head).to_bytes(LENGTH_BYTES, "little"), head]
    return b"".join([*parts, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])


def from_bytes(data: bytes) -> tuple[Any, dict[str, NDArray[Any]]]:
    at = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    head = json.loads(data[LENGTH_BYTES:at])
    arrays = {}
    for name, kind, shape in head["arrays"]:
        dtype, n = np.dtype(kind), int(np.prod(shape))
        arrays[name] = np.frombuffer(data, dtype, n, at).reshape(shape).copy()
        at += n * dtype.itemsize
    return head["meta"], arrays
