"""Strings that end a turn: at the token that completes one of them, as an end token does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.rollout.engine import Request

UNKNOWN = "\ufffd"  # what a part of a character decodes to


class Stops:
    """Finds where the responses of an engine end by the `stop` of their requests.

    Only a token with the last character of a string can complete it. Such tokens are marked once for the whole
    vocabulary, so that a tick looks them up, and text is decoded only where one was drawn.
    """

    def __init__(self, tokenizer: Any, n_vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._pieces: Sequence[str] | None = None
        self._known: set[str] = set()
        self.may_complete = np.zeros(n_vocabulary, np.bool_)  # by token

    def expect(self, *requests: Request) -> bool:
        """Mark the tokens that may complete one of their strings. Returns whether there are new ones."""
        new = {end[-1] for request in requests for _, end in request.stop} - self._known
        for last in new:
            self.may_complete |= self._has(last)
        self._known |= new
        return bool(new)

    def end(self, request: Request, tokens: NDArray[np.int32], n_known: int) -> int | None:
        """How many of the tokens belong to the response, where one after the first `n_known` completes a string."""
        if not request.stop:
            return None
        for n in n_known + 1 + np.flatnonzero(self.may_complete[tokens[n_known:]]):
            text = self._tokenizer.decode(tokens[:n])
            if any(is_complete(text, begin, end) for begin, end in request.stop):
                return int(n)
        return None

    def _has(self, last: str) -> NDArray[np.bool_]:
        """Of every token, whether it may bring this character. A token alone may lose a space at its beginning."""
        if last == " ":
            return np.ones(len(self.may_complete), np.bool_)
        if self._pieces is None:
            self._pieces = self._tokenizer.batch_decode([[token] for token in range(len(self.may_complete))])
        is_part = not last.isascii()
        return np.array([last in piece or (is_part and UNKNOWN in piece) for piece in self._pieces])


def is_complete(text: str, begin: str, end: str) -> bool:
    """Whether `end` stands after the first `begin`."""
    _, found, after = text.partition(begin) if begin else ("", True, text)
    return bool(found) and end in after
