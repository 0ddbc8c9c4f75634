"""`gym:TASK?parameter=value&…`: what a name says, before reasoning-gym is asked what it knows. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dapo.config.own_verifier import GYM_PREFIX
from dapo.errors import DataError

PREFIX = GYM_PREFIX
VERSION = "0.1.25"  # of reasoning-gym: another one draws other problems, and its scorers have not been read
TRAIN, HELD_OUT = "train", "held-out"
HELD_OUT_SHARE = 8  # one question in eight is held out, by its text
MAX_SIZE = 1_000_000
MAX_SEED = 2**32
_TASK = re.compile(r"[a-z0-9_]+")
_EXAMPLE = "Write it as gym:countdown?min_numbers=3&size=5000. `dapo data gym` lists the tasks."


@dataclass(frozen=True, slots=True)
class GymName:
    """A task with its parameters as typed, and which of its problems are meant."""

    task: str
    parameters: Mapping[str, str]
    size: int
    seed: int
    split: str
    bare: bool  # the expression alone, as the bundled model reads it

    @property
    def canonical(self) -> str:
        """The name in full; equal names draw the same problems."""
        own = {**dict(sorted(self.parameters.items())), "size": self.size, "seed": self.seed, "split": self.split}
        return f"{PREFIX}{self.task}?" + "&".join(f"{key}={value}" for key, value in own.items())

    @property
    def n_drawn(self) -> int:
        """How many entries may be drawn for `size` problems of this split: some are of the other one, some repeat."""
        return 2 * self.size * (1 if self.split == TRAIN else HELD_OUT_SHARE) + 100


def parse(text: str, *, split: str = TRAIN) -> GymName:
    """What was typed as a name; `split` where it names none. Values are taken as they stand: + is a plus."""
    task, mark, rest = text.removeprefix(PREFIX).partition("?")
    if not _TASK.fullmatch(task):
        raise DataError(f"{text}: {task!r} is no name of a task.", remedy=_EXAMPLE)
    pairs: dict[str, str] = {}
    for part in rest.split("&") if mark else ():
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise DataError(f"{text}: {part!r} is not parameter=value.", remedy=_EXAMPLE)
        if key in pairs:
            raise DataError(f"{text}: {key} is given twice.", remedy="Keep one of the two.")
        pairs[key] = value
    split = pairs.pop("split", split)
    if split not in (TRAIN, HELD_OUT):
        raise DataError(f"{text}: split = {split!r}: no such split.", remedy=f"Use {TRAIN} or {HELD_OUT}.")
    bare = pairs.pop("bare", "false")
    if bare not in ("true", "false"):
        raise DataError(f"{text}: bare = {bare!r}: is not true or false.", remedy="Use bare=true.")
    return GymName(
        task,
        pairs_without(pairs, "size", "seed"),
        whole(text, pairs, "size", default=2_000 if split == TRAIN else 200, least=1, most=MAX_SIZE),
        whole(text, pairs, "seed", default=0, least=0, most=MAX_SEED),
        split,
        bare == "true",
    )


def pairs_without(pairs: Mapping[str, str], *names: str) -> dict[str, str]:
    return {key: value for key, value in pairs.items() if key not in names}


def whole(text: str, pairs: Mapping[str, str], key: str, *, default: int, least: int, most: int) -> int:
    """A whole number within its bounds."""
    value = pairs.get(key, str(default))
    if not value.isascii() or not value.isdigit() or len(value) > 12 or not least <= int(value) <= most:
        raise DataError(
            f"{text}: {key} = {value!r}: is not a whole number from {least} to {most:,}.",
            remedy=f"Use {key}={default}, say.",
        )
    return int(value)
