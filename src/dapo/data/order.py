"""The order of visits: shuffled anew each epoch, no problem twice in a step, resumable to the exact problem."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dapo.errors import CheckpointError, DataError


def epoch_order(n_problems: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of 0 … n−1 from (seed, epoch) alone, the same under any library version: a sort by hash."""

    def rank(index: int) -> tuple[bytes, int]:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=8).digest(), index

    return sorted(range(n_problems), key=rank)


class ProblemOrder:
    """Hands out problem indices, one submission at a time.

    Every epoch visits every problem once. A problem that already stands in the current step (its last epoch ended in
    this step) is put off to the first later step that has room for it. Visits are not stored but follow from the
    position: `rewind` therefore takes back the visits of submissions that were not used.

    A step may submit more than it uses; call `rewind(n_used)` at its end, with the number of submissions up to
    and including the last group used. The next step continues just after it.
    """

    def __init__(self, n_problems: int, *, seed: int) -> None:
        if n_problems < 1:
            raise DataError(f"n_problems = {n_problems}: there is no problem to visit.", remedy="Check data.train.")
        self.n_problems = n_problems
        self.seed = seed
        self._clear_step()
        self._epoch = -1
        self._place(epoch=0, position=0, put_off=[])
        self._start = self._here()

    @property
    def epoch(self) -> int:
        """The epoch the next fresh problem comes from, counted from 0."""
        return self._epoch

    @property
    def n_submitted(self) -> int:
        """Submissions since the start of the run, those taken back excluded."""
        return self._epoch * self.n_problems + self._position - len(self._put_off)

    def visits(self, index: int) -> int:
        """How often this problem was submitted so far: once per epoch that has passed it, less what is put off."""
        return self._epoch + (self._rank[index] < self._position) - self._put_off.count(index)

    def start_step(self) -> None:
        """Begin a step: from here on, no problem comes twice until the next call."""
        self._clear_step()
        self._start = self._here()

    def next(self) -> tuple[int, int] | None:
        """The next problem's index and its visit number (0 the first time); None when this step has had them all."""
        if len(self._step) == self.n_problems:
            return None
        index = self._first_fresh()
        visit = self.visits(index) - 1
        self._step.append(index)
        self._taken.add(index)
        return index, visit

    def rewind(self, n_used: int) -> None:
        """Take back this step's submissions after the first `n_used`, with their visits."""
        if not 0 <= n_used <= len(self._step):
            raise ValueError(f"rewind to {n_used}: this step has made {len(self._step)} submissions")
        epoch, position, put_off = self._start
        self._clear_step()
        self._place(epoch=epoch, position=position, put_off=list(put_off))
        for _ in range(n_used):
            self.next()

    def state(self) -> dict[str, Any]:
        """All there is to know, ready for JSON: a few numbers and the current step's problems."""
        epoch, position, put_off = self._start
        return {
            "n_problems": self.n_problems,
            "seed": self.seed,
            "epoch": epoch,
            "position": position,
            "put_off": list(put_off),
            "step": list(self._step),
        }

    @classmethod
    def restore(
        cls, state: Mapping[str, Any], *, n_problems: int | None = None, seed: int | None = None
    ) -> ProblemOrder:
        """The order as it was at `state()`. Given the set's size or the seed, a state of another run is refused."""
        for name, wanted in (("n_problems", n_problems), ("seed", seed)):
            if wanted is not None and state[name] != wanted:
                raise CheckpointError(
                    f"data cursor: {name} is {wanted}, but the checkpoint was written with {state[name]}.",
                    remedy="Resume with the problem set and train.seed of the run, or start a new run.",
                )
        order = cls(state["n_problems"], seed=state["seed"])
        if state["position"] > order.n_problems or any(index >= order.n_problems for index in state["put_off"]):
            raise CheckpointError(
                f"data cursor: position {state['position']} or a problem put off is beyond the set's "
                f"{order.n_problems} problems.",
                remedy="The checkpoint is damaged; resume from an earlier one.",
            )
        order._place(epoch=state["epoch"], position=state["position"], put_off=list(state["put_off"]))
        order.start_step()
        for index in state["step"]:
            came = order.next()
            if came is None or came[0] != index:
                raise CheckpointError(
                    f"data cursor: problem {index} does not follow from seed and position.",
                    remedy="The checkpoint is damaged; resume from an earlier one.",
                )
        return order

    def _first_fresh(self) -> int:
        """Put-off problems first, then the epoch's; one that stands in this step already is put off."""
        for at, index in enumerate(self._put_off):
            if index not in self._taken:
                del self._put_off[at]
                return index
        while True:
            if self._position == self.n_problems:
                self._place(epoch=self._epoch + 1, position=0, put_off=self._put_off)
            index = self._order[self._position]
            self._position += 1
            if index not in self._taken:
                return index
            self._put_off.append(index)

    def _clear_step(self) -> None:
        self._step: list[int] = []  # what this step was given, in order
        self._taken: set[int] = set()

    def _here(self) -> tuple[int, int, tuple[int, ...]]:
        return self._epoch, self._position, tuple(self._put_off)

    def _place(self, *, epoch: int, position: int, put_off: list[int]) -> None:
        if epoch != self._epoch:
            self._order: Sequence[int] = epoch_order(self.n_problems, seed=self.seed, epoch=epoch)
            self._rank = [0] * self.n_problems
            for place, index in enumerate(self._order):
                self._rank[index] = place
        self._epoch, self._position, self._put_off = epoch, position, put_off
