"""What became of a step's groups, for the run's ledger (`report/ledger.py` has its form)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapo.report.ledger import CARRIED, HELD, IN_FLIGHT, RETURNED, TRAINED, Entry
from dapo.sampling.accounting import n_tokens, outcome_of
from dapo.sampling.carry import oldest_version
from dapo.sampling.collect import PendingGroup
from dapo.sampling.dynamic import SamplingState
from dapo.types import Group

Key = tuple[str, int]


def entries_of(
    started: Sequence[PendingGroup],
    n_used: int,
    earlier: Iterable[Group | PendingGroup],
    resolved: Iterable[Group],
    trained: Sequence[Group],
    stale: Iterable[Group],
    state: SamplingState,
) -> list[Entry]:
    """An entry for every group that the step started or found: each has exactly one fate.

    `started` by the step, in order, of which in-order selection used `n_used`; `earlier`: what `state` held before.
    """
    complete = {key_of(group): group for group in (*(g for g in earlier if isinstance(g, Group)), *resolved)}
    fates = {key_of(group): outcome_of(group) for group in complete.values() if not group.is_mixed}
    fates |= {key_of(group): "stale" for group in stale}
    for fate, groups in ((HELD, state.held), (CARRIED, state.carried), (IN_FLIGHT, state.pending), (TRAINED, trained)):
        fates |= {key_of(group): fate for group in groups}
    fates |= {key_of(group): RETURNED for group in started[n_used:]}
    under_way = [key_of(group) for group in earlier if isinstance(group, PendingGroup)]
    every = dict.fromkeys([*under_way, *complete, *map(key_of, started)])
    return [entry(key, fates.get(key) or unclaimed(key, complete), complete.get(key)) for key in every]


def unclaimed(key: Key, complete: dict[Key, Group]) -> str:
    """A complete group that nobody wanted is surplus; one that was still being generated had grown too old."""
    return "surplus" if key in complete else "stale"


def entry(key: Key, fate: str, group: Group | None) -> Entry:
    if group is None:
        return Entry(*key, fate)
    return Entry(*key, fate, len(group.completions), n_tokens(group), group.n_correct, oldest_version(group))


def key_of(group: Group | PendingGroup) -> Key:
    return group.problem.id, group.visit
