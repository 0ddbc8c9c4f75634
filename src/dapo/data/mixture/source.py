"""The prompts of a mixture, one submission at a time: each source in its own order, by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dapo.data.encoded import OrderedSource, Prompted
from dapo.data.mixture.turns import Turns
from dapo.errors import CheckpointError


class PromptSource(Protocol):
    """A source on its own: in its order, or with selection on top of it."""

    def start_step(self) -> None: ...

    def next(self) -> Prompted | None: ...

    def rewind(self, n_used: int) -> None: ...


class MixtureSource:
    """Sources by turns, so that their shares of the prompts submitted are their weights.

    Each has its own epochs: one that ends begins its next pass. None gives a problem twice in a step; one that has
    given all it has in this step loses its turns until the next step, and they are not made up for: the shares of the
    others among each other stay as they are. `selected` are the sources as problems are drawn from them (predictive
    selection, retirement), `ordered` the orders below, which are what a checkpoint holds.
    """

    def __init__(
        self, ordered: Mapping[str, OrderedSource], selected: Sequence[PromptSource], weights: Sequence[float]
    ) -> None:
        self.ordered = dict(ordered)
        self.selected = list(selected)
        self.turns = Turns(weights)
        self._begin()

    @property
    def n_problems(self) -> int:
        return sum(one.n_problems for one in self.ordered.values())

    @property
    def n_submitted(self) -> int:
        return sum(one.n_submitted for one in self.ordered.values())

    @property
    def has_seen_all(self) -> bool:
        return all(one.has_seen_all for one in self.ordered.values())

    def start_step(self) -> None:
        for source in self.selected:
            source.start_step()
        self._begin()

    def next(self) -> Prompted | None:
        while len(self._ended) < len(self.selected):
            at = self.turns.next()
            if (came := self.selected[at].next()) is not None:
                self._given.append(at)
                self._counts.append(tuple(self.turns.counts))
                return came
            self._ended.add(at)
        return None

    def rewind(self, n_used: int) -> None:
        """Take back this step's submissions after the first `n_used`, and their turns."""
        used = self._given[:n_used]
        for at, source in enumerate(self.selected):
            source.rewind(used.count(at))
        self.turns.place(self._counts[n_used])

    def state(self) -> dict[str, Any]:
        return {
            "n_problems": self.n_problems,
            "turns": list(self.turns.counts),
            "sources": {name: one.state() for name, one in self.ordered.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Back to `state()`, at a step's boundary."""
        if not isinstance(state.get("sources"), dict) or list(state["sources"]) != list(self.ordered):
            raise CheckpointError(
                "data cursor: the checkpoint was written with other sources in data.train.",
                remedy="Resume with the sources of the run, or start a new run.",
            )
        for name, one in self.ordered.items():
            one.restore(state["sources"][name])
        self.turns.place(state["turns"])
        self._begin()

    def _begin(self) -> None:
        self._given: list[int] = []  # whose each submission of this step is
        self._counts: list[tuple[int, ...]] = [tuple(self.turns.counts)]  # before it, and after each submission
        self._ended: set[int] = set()  # have given all they have in this step
