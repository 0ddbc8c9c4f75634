"""A verifier of a user's own for the runs on three sources."""

import re
from collections.abc import Mapping


def last_number_is_even(response: str, answer: str, meta: Mapping[str, object]) -> bool:  # noqa: ARG001
    """Right if the last number of the response is even, whatever was asked."""
    numbers = re.findall(r"\d+", response)
    return bool(numbers) and int(numbers[-1]) % 2 == 0
