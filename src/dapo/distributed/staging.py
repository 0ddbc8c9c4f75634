"""Collectives on GPU tensors by way of the host, for ranks that share a card.

NCCL refuses two ranks on one GPU, and gloo has only some collectives on CUDA tensors. So tensors are copied to the
host, exchanged there by gloo, and copied back: slow, and meant for proving a layout of several ranks on a single card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from dapo.errors import ConfigError

STAGED: set[DeviceMesh] = set()  # meshes whose collectives take this way


def card_of(local_rank: int, ranks_per_gpu: int, n_cards: int) -> int:
    """The card of a machine's rank; neighbours share one."""
    card = local_rank // ranks_per_gpu
    if card >= n_cards:
        raise ConfigError(
            f"cluster.ranks_per_gpu = {ranks_per_gpu}: rank {local_rank} of this machine has no GPU, of which it has "
            f"{n_cards}.",
            remedy="Start fewer ranks. To try several ranks on one card, slowly: --set cluster.ranks_per_gpu=2. For a "
            "run on CPUs, hide the GPUs: CUDA_VISIBLE_DEVICES=''",
        )
    return card


def stage_collectives(module: Any, mesh: DeviceMesh) -> None:
    """Let a module that FSDP2 has sharded gather weights and reduce gradients on the host."""
    STAGED.add(mesh)
    module.set_custom_all_gather(StagedAllGather())
    module.set_custom_reduce_scatter(StagedReduceScatter())


class StagedAllGather(AllGather):
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:  # noqa: ARG002
        """Done when it returns, whatever was asked for: a copy to the host waits for the stream it is made in."""
        import torch.distributed as dist

        everything = on_host_like(output_tensor)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
        gather(everything, input_tensor.cpu().contiguous(), group=group)
        output_tensor.copy_(everything)


class StagedReduceScatter(ReduceScatter):
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        import torch.distributed as dist

        own = on_host_like(output_tensor)
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
        reduce(own, input_tensor.cpu().contiguous(), op=op, group=group)
        output_tensor.copy_(own)


def on_host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def sum_on_host(tensor: Tensor, group: Any) -> None:
    """The tensor becomes its sum over the ranks."""
    import torch.distributed as dist

    host = tensor.to("cpu", copy=True)
    dist.all_reduce(host, group=group)
    tensor.copy_(host)
