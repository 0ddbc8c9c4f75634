"""A world of threads: several ranks in one process, for what ranks do together without torch.distributed."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dapo.distributed.world import World


class Place(World):
    """One rank of a world of threads: what is exchanged lies on a shared table."""

    def __init__(self, rank: int, size: int, table: list[Any], gate: threading.Barrier) -> None:
        self.rank, self.size, self.table, self.gate = rank, size, table, gate

    def gather(self, value: Any) -> list[Any]:
        self.table[self.rank] = value
        self.gate.wait(30)
        everything = list(self.table)
        self.gate.wait(30)
        return everything

    exchange = gather

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        for tensor, *parts in zip(tensors, *self.gather([tensor.clone() for tensor in tensors]), strict=True):
            tensor.copy_(torch.stack(parts).sum(0))


def on_ranks(size: int, work: Callable[[World], Any]) -> list[Any]:
    """work(world) on every rank of a world of threads."""
    table, gate, results = [None] * size, threading.Barrier(size), [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(Place(rank, size, table, gate))
        except BaseException:
            gate.abort()
            raise

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
