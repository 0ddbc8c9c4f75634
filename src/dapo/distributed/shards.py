"""Sharded modules (FSDP2): each rank keeps a slice of every weight, and layers are gathered while they are used."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo.distributed.staging import STAGED, stage_collectives
from dapo.distributed.world import World

Module = TypeVar("Module", bound=nn.Module)


class Sharding:
    """How the modules of a run are sharded: over all ranks, gradients summed (not averaged) in the masters' type.

    Where masters are wider than `compute`, layers are gathered and run in `compute`.
    """

    def __init__(self, world: World, device: str, compute: torch.dtype) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # The warning is about changing a layer's output in place, which we never do.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        self.masters = compute if compute.itemsize >= 4 else torch.float32
        self.mesh = init_device_mesh(device, (world.size,))
        self.precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.masters != compute:
            self.precision = MixedPrecisionPolicy(compute, self.masters, cast_forward_inputs=False)
        self.is_alone = world.size == 1
        self.is_staged = world.stages

    def apply(self, module: nn.Module) -> None:
        """Shard what of this module is not sharded yet; its whole weights are freed."""
        from torch.distributed.fsdp import fully_shard

        # One rank saves nothing by gathering a layer twice; None is the library's choice, which keeps what comes last.
        reshards = False if self.is_alone else None
        sharded = fully_shard(module, mesh=self.mesh, reshard_after_forward=reshards, mp_policy=self.precision)
        if not self.is_alone:  # its sum is its own gradient, and dividing by 1 would copy it
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        if self.is_staged:
            stage_collectives(sharded, self.mesh)

    def in_place(self, module: Module, layers: Sequence[nn.Module]) -> Module:
        """Every layer by itself, the rest together; weights are widened to masters on the way."""
        parts: list[nn.Module] = [*layers, module]
        for part in parts:
            part.to(self.masters)
            self.apply(part)
        return module

    def copy_of(
        self, module: Module, layers_of: Callable[[Module], Sequence[nn.Module]], *, shared: Iterable[object] = ()
    ) -> Module:
        """A sharded copy; the module itself stays whole.

        There is never a second whole copy: this one begins without storage, and each layer gets its weights just before
        it is sharded. Things in `shared` are not copied. Tied weights stay tied, frozen ones frozen.
        """
        memo: dict[int, Any] = {id(thing): thing for thing in shared}
        source: dict[int, Tensor] = {}
        for parameter in module.parameters():
            empty = nn.Parameter(
                torch.empty_like(parameter, dtype=self.masters, device="meta"), requires_grad=parameter.requires_grad
            )
            memo[id(parameter)] = empty
            source[id(empty)] = parameter
        made = copy.deepcopy(module, memo)
        filled: dict[int, nn.Parameter] = {}
        parts: list[nn.Module] = [*layers_of(made), made]
        for part in parts:
            for owner in part.modules():
                for name, empty in list(owner.named_parameters(recurse=False)):
                    if not empty.is_meta:
                        continue
                    if id(empty) not in filled:
                        weight = source[id(empty)].detach().to(self.masters, copy=True).contiguous()
                        filled[id(empty)] = nn.Parameter(weight, requires_grad=empty.requires_grad)
                    setattr(owner, name, filled[id(empty)])
            self.apply(part)
            filled.clear()  # weights are tied within a part only
        return made


@torch.no_grad()
def refresh(gathered: nn.Module, sharded: nn.Module) -> None:
    """The whole module takes over the sharded one's weights, one at a time. All ranks take part."""
    reshard(sharded)
    for target, source in zip(gathered.parameters(), sharded.parameters(), strict=True):
        assert isinstance(source, DTensor), "every weight of a sharded module is sharded"
        target.copy_(whole(local(source.detach()).to(target.dtype), source))


def reshard(module: nn.Module) -> None:
    """Let go of what a forward pass gathered and no backward pass followed."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_weights(module: nn.Module, *, is_kept: bool = True) -> dict[str, Tensor] | None:
    """All weights of a sharded module, copied to the host; None for a module that is whole. All ranks take part.

    A rank that has no use for them keeps none.
    """
    reshard(module)
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return None
    weights = {}
    for name, value in module.state_dict().items():
        weight = whole(local(value), value)
        if is_kept:
            weights[name] = weight.to("cpu", copy=True)
    return weights


def local(tensor: Tensor) -> Tensor:
    """This rank's part: a slice of a sharded tensor, the whole of any other; the storage is shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor whose parts lie on the ranks as those of `like` do. All ranks take part."""
    if not isinstance(like, DTensor) or like.device_mesh.size() == 1:
        return part
    if like.device_mesh in STAGED:
        return on_host(part, like).full_tensor().to(part.device)
    made = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made.full_tensor()


def on_host(part: Tensor, like: DTensor) -> DTensor:
    """A copy of this rank's part on the host, which knows its place in the whole tensor, as those of `like` do."""
    return DTensor.from_local(
        part.to("cpu", copy=True),
        host_mesh(like.device_mesh),
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks' processors."""
    return mesh if mesh.device_type == "cpu" else host_mesh_beside(mesh)


@cache
def host_mesh_beside(mesh: DeviceMesh) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (mesh.size(),))


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as those of `like` lie."""
    if not isinstance(like, DTensor):
        return tensor
    placed = tensor.to(like.device_mesh.device_type)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None).to_local()
