"""The processes of a run and their collectives: sum, gather, agree. A run of one process is a world of its own.

Every rank runs the same loop and makes the same decisions from the same values; these collectives make the values the
same everywhere. What a rank computes alone is exchanged as bytes on the host, or summed where the tensors are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dapo.config.schema import ClusterConfig
from dapo.distributed.message import LENGTH_BYTES
from dapo.errors import ConfigError, DapoError, EngineError, out_of_memory
from dapo.waiting.registry import waiting

BUCKET_BYTES = 1 << 26  # tensors are summed together up to this size
ERROR_KEY = "dapo/error"
ENVELOPE_BYTES = 1024  # a message that fits is exchanged at once
GRACE_S = 3.0  # for the rank that failed first to report why, before others report that they lost it


class World:
    """A world of one process: collectives return its own values."""

    rank = 0
    size = 1
    n_collectives = 0  # so far
    stages = False  # ranks share a card: collectives on its tensors take place on the host

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's data, in the order of ranks."""
        return [data]

    def gather(self, value: Any) -> list[Any]:
        """The same for what JSON can hold; floats keep every bit."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """The first rank's value."""
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over the ranks, bit for bit the same on all of them."""

    def barrier(self) -> None:
        """Return when all ranks have arrived."""

    def announce(self, message: str) -> None:
        """Tell the other ranks why this one is about to end; theirs is then not the error to report."""

    def new_group(self) -> World:
        """The same ranks in a process group of their own, for the collectives of a second thread. All ranks call it."""
        return self


ALONE = World()


class Ranks(World):
    """This process and its peers, by torch.distributed: gloo for the host, NCCL for tensors on GPUs.

    Where ranks share a GPU, its tensors are summed on the host.
    """

    def __init__(self, rank: int, size: int, group: Any = None, timeout: timedelta | None = None) -> None:
        self.rank, self.size, self.group, self.timeout = rank, size, group, timeout

    def together(self, what: str) -> waiting:
        """A collective operation, as a wait: it ends when every rank has come to it."""
        self.n_collectives += 1
        return waiting(f"all ranks ({what})", collective=self.n_collectives)

    def announce(self, message: str) -> None:
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        store.compare_set(ERROR_KEY, "", f"rank {self.rank}: {message}")

    def new_group(self) -> Ranks:
        import torch.distributed as dist

        group = dist.new_group(backend="gloo", timeout=self.timeout)
        return Ranks(self.rank, self.size, group, self.timeout)

    def exchange(self, data: bytes) -> list[bytes]:
        """In one collective where every message fits into an envelope, else in two: the engine does this every tick."""
        head, rest = data[:ENVELOPE_BYTES], data[ENVELOPE_BYTES:]
        with self.together("exchange"):
            envelopes = self._gathered(len(data).to_bytes(LENGTH_BYTES, "little") + head, LENGTH_BYTES + ENVELOPE_BYTES)
            lengths = [int.from_bytes(envelope[:LENGTH_BYTES], "little") for envelope in envelopes]
            n_more = max(max(lengths) - ENVELOPE_BYTES, 0)
            rests = self._gathered(rest, n_more) if n_more else [b""] * self.size
        whole = (envelope[LENGTH_BYTES:] + more for envelope, more in zip(envelopes, rests, strict=True))
        return [message[:length] for message, length in zip(whole, lengths, strict=True)]

    def _gathered(self, data: bytes, size: int) -> list[bytes]:
        """Every rank's bytes, filled up to `size`."""
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        return [part.numpy().tobytes() for part in gathered(own, self.size, self.group)]

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(data) for data in self.exchange(json.dumps(value).encode())]

    def from_first(self, value: Any) -> Any:
        return self.gather(value if self.is_first else None)[0]

    def any(self, flag: bool) -> bool:
        import torch.distributed as dist

        count = torch.tensor([int(flag)])
        with self.together("agreement"):
            dist.all_reduce(count, group=self.group)
        return bool(count.item())

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        for bucket in buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._sum(bucket[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._sum(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _sum(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        from dapo.distributed.staging import sum_on_host

        with self.together("sum"):
            if self.stages:
                sum_on_host(tensor, self.group)
            else:
                dist.all_reduce(tensor, group=self.group)

    def barrier(self) -> None:
        self.any(False)


def gathered(own: Tensor, size: int, group: Any = None) -> list[Tensor]:
    """Every rank's tensor; all are of one shape."""
    import torch.distributed as dist

    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return parts


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type and device together, as far as the bucket's size allows."""
    bucket: list[Tensor] = []
    n_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        is_like = bool(bucket) and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not is_like or n_bytes + size > BUCKET_BYTES):
            yield bucket
            bucket, n_bytes = [], 0
        bucket.append(tensor)
        n_bytes += size
    if bucket:
        yield bucket


# ------------------------------------------------------------------ beginning and end


@contextmanager
def open_world(cluster: ClusterConfig) -> Iterator[World]:
    """The world that `cluster.backend` names, as long as the run lasts.

    The rank that fails first reports why; ranks that fail because they lost it are silent. All exit with an error.
    """
    check_launch(cluster, os.environ)
    if cluster.backend == "none":
        yield ALONE
        return
    import torch.distributed as dist

    from dapo.distributed.staging import card_of

    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(card_of(local_rank, cluster.ranks_per_gpu, torch.cuda.device_count()))
    timeout = timedelta(seconds=cluster.timeout_s)
    is_staged = torch.cuda.is_available() and cluster.ranks_per_gpu > 1
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and not is_staged else "gloo"
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"cluster.backend = {cluster.backend}: the ranks do not find each other: {error}") from None
    world = Ranks(dist.get_rank(), dist.get_world_size(), timeout=timeout)
    world.stages = is_staged
    store = dist.distributed_c10d._get_default_store()
    try:
        yield world
    except DapoError as error:
        end_with(store, world, f"{type(error).__name__}: {error.message}", error)
    except RuntimeError as error:
        if not is_about_peers(error):
            end_with(store, world, f"{type(error).__name__}: {error}", error)
        lost = EngineError(
            f"rank {world.rank} of {world.size} lost contact with another rank, which ended without a message "
            f"(killed?) or was silent for cluster.timeout_s = {cluster.timeout_s}.",
            remedy="Resume from the newest checkpoint: dapo resume RUN, on as many ranks as you like.",
        )
        time.sleep(GRACE_S)
        end_with(store, world, lost.message, lost)
    except Exception as error:  # whatever it is, the other ranks must hear of it, or they wait for this one
        end_with(store, world, f"{type(error).__name__}: {error}", error)
    finally:
        if dist.is_initialized():  # vLLM destroys it when it shuts down
            dist.destroy_process_group()


@contextmanager
def one_rank(device: str) -> Iterator[World]:
    """A process group of this process alone, for what is sharded over one rank. No other process can join it."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(0, 1)
    finally:
        dist.destroy_process_group()


def end_with(store: Any, world: Ranks, message: str, error: Exception) -> None:
    """Raise this rank's error if it is the first to fail; else exit silently."""
    mine = f"rank {world.rank}: {message}"
    try:
        is_first_to_fail = store.compare_set(ERROR_KEY, "", mine).decode() == mine
    except RuntimeError:  # the machine that held the store is gone
        is_first_to_fail = True
    if not is_first_to_fail:
        raise SystemExit(2) from None
    known = error if isinstance(error, DapoError) else out_of_memory(error)
    if known is None:
        raise error
    sys.stderr.write(f"rank {world.rank} of {world.size}:\n")
    raise known from None


def is_about_peers(error: RuntimeError) -> bool:
    """Did a collective fail because another rank is gone or silent?"""
    import torch.distributed as dist

    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    message = str(error).lower()
    return any(word in message for word in ("gloo", "nccl", "connection closed", "connection reset", "timed out"))


def check_launch(cluster: ClusterConfig, environment: Mapping[str, str]) -> None:
    """Config and launcher must agree on how many processes there are, and that there are some."""
    size = environment.get("WORLD_SIZE")
    if cluster.backend == "none":
        if size is not None and int(size) > 1:
            raise ConfigError(
                f"cluster.backend = none: torchrun started {size} processes, and each would do the whole run.",
                remedy="Set cluster.backend = torchrun.",
            )
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in environment]
    if size is None or missing:
        raise ConfigError(
            f"cluster.backend = {cluster.backend}: {missing[0]} is not set, so this process was not started as a rank.",
            remedy="Start it with: torchrun --nproc-per-node N -m dapo train RECIPE --set cluster.backend=torchrun",
        )
    if cluster.gpus not in (1, int(size)):
        raise ConfigError(
            f"cluster.gpus = {cluster.gpus}: torchrun started {size} processes.",
            remedy=f"Set cluster.gpus = {size}, or start {cluster.gpus}.",
        )
