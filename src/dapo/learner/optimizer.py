"""AdamW on float32 masters: gradients accumulate in float32, are unscaled and clipped, and refused if not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from dapo.config.schema import TrainConfig
from dapo.distributed.shards import local, on_host, part_of, whole
from dapo.distributed.world import ALONE, World
from dapo.learner.loss_scale import LossScale
from dapo.learner.moments import Kind, make_moments


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    gradient_norm: float  # before clipping
    is_skipped: bool  # the gradient was not finite; nothing changed
    is_bad: bool = False  # … and a lower loss scale, if there is one, could not help


def lr_factor(train: TrainConfig, step: int) -> float:
    """Of the full learning rate in step k = 1, 2, … of N: k/W while k ≤ W, then 1 or falling to its end; never 0.

    Linear: (N+1−k)/(N+1−F). Cosine: (1+cos(π·(k−F)/(N+1−F)))/2. F = max(W, 1) is the one step at the full rate, with a
    warm-up its last, without one the first.
    """
    if step < train.warmup_steps or train.lr_decay == "none":
        return warmup_factor(train, step)
    full = max(train.warmup_steps, 1)
    done = (step - full) / (train.steps + 1 - full)
    return (1 - done) if train.lr_decay == "linear" else (1 + math.cos(math.pi * done)) / 2


def warmup_factor(train: TrainConfig, step: int, *, most: int | None = None) -> float:
    """Of the rate in step k of a warm-up, which has `most` steps where that is fewer than the config's."""
    n_steps = train.warmup_steps if most is None else min(train.warmup_steps, most)
    return min(1.0, step / max(n_steps, 1))


class Optimizer:
    """Owns the masters of one module's parameters.

    Parameters of 16 bits have a float32 master, rounded in place into the same storage after each step; wider ones are
    their own master. A 16-bit gradient moves into its master as soon as the backward pass has made it, so that the
    16-bit gradients of all parameters never exist together; `models.whole_layer` adds to the master's by itself, and
    wider ones accumulate where they are.

    With several ranks each has the gradient of its own rows, and `step` sums them. Of a sharded parameter each rank has
    a slice: of the weights, the moments and the summed gradient. `has_16bit_weights`: sharded parameters are the
    masters of weights that are used with 16 bits, and a checkpoint stores them as such. `loss_scale`: of float16; the
    gradients are those of the loss times it until `step` divides them.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        moments: Kind = "float32",
        world: World = ALONE,
        has_16bit_weights: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.world = world
        self.loss_scale = loss_scale
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.masters = {
            name: p if p.dtype.itemsize >= 4 else Parameter(p.detach().float()) for name, p in self.parameters.items()
        }
        self.max_grad_norm = max_grad_norm
        is_cuda = any(p.is_cuda for p in self.parameters.values())
        self.moments = make_moments(moments, betas=betas, weight_decay=weight_decay, is_cuda=is_cuda)
        self.rounded = [name for name, p in self.parameters.items() if self.masters[name] is not p]
        self.is_sharded = any(local(p) is not p for p in self.parameters.values())
        self.saved = list(self.parameters) if has_16bit_weights and self.is_sharded else self.rounded
        for name in self.rounded:
            self._move_gradient_to(self.masters[name], self.parameters[name])

    def _move_gradient_to(self, master: Parameter, parameter: Parameter) -> None:
        def move(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
        parameter.master = master  # type: ignore[attr-defined]

    def scaled(self, loss: Tensor) -> Tensor:
        """What the backward pass begins from."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    @torch.no_grad()
    def step(self, lr: float) -> UpdateOutcome:
        """Clip, update, round into the parameters. The host waits for the device once, for the gradient's norm."""
        masters = self._gathered_gradients()
        if not masters:
            return UpdateOutcome(0.0, is_skipped=False)
        grads = [master.grad for master in masters.values() if master.grad is not None]
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        total = self._norm(grads) / scale
        norm = float(total)
        if not math.isfinite(norm):  # on every rank, or on none: the norm is that of all ranks' gradients
            self.zero_grad()
            is_search = self.loss_scale is not None and self.loss_scale.lower()
            return UpdateOutcome(norm, is_skipped=True, is_bad=not is_search)
        coefficient = (self.max_grad_norm / (total + 1e-6)).clamp(max=1) / scale
        if float(coefficient) != 1:
            torch._foreach_mul_(grads, coefficient)
        self.moments.update(masters, lr)
        if self.rounded:
            torch._foreach_copy_(
                [self.parameters[name] for name in self.rounded], [self.masters[name] for name in self.rounded]
            )
        self.zero_grad()
        if self.loss_scale is not None:
            self.loss_scale.count()
        return UpdateOutcome(norm, is_skipped=False)

    def _gathered_gradients(self) -> dict[str, Tensor]:
        """Masters with the gradient of the whole update, or this rank's slices of both; none without a gradient."""
        if self.is_sharded:
            slices = {}
            for name, master in self.masters.items():
                if master.grad is not None:
                    slices[name] = local(master.detach())
                    slices[name].grad = local(master.grad)
            return slices
        if self.world.size > 1:
            has_gradient = torch.tensor([master.grad is not None for master in self.masters.values()]).int()
            self.world.sum_([has_gradient])  # a rank without rows has none, and takes part
            wanted = [master for master, n in zip(self.masters.values(), has_gradient.tolist(), strict=True) if n]
            for master in wanted:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            self.world.sum_([master.grad for master in wanted if master.grad is not None])
        return {name: master for name, master in self.masters.items() if master.grad is not None}

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """Of the whole gradient."""
        norm: Tensor = torch.nn.utils.get_total_norm(grads)
        if self.is_sharded:
            square = norm.double() ** 2
            self.world.sum_([square])
            norm = square.sqrt().to(norm.dtype)
        return norm

    def bytes_to_come(self) -> int:
        """Gradients and moments that are not there yet and will be by the end of the next update."""
        return sum(
            (master.numel() * master.dtype.itemsize if master.grad is None else 0)
            + self.moments.bytes_to_come(name, local(master))
            for name, master in self.masters.items()
        )

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs in addition to the weights, unsharded. Collective."""
        saved = {f"master.{name}": self.whole(name, self.masters[name].detach()) for name in self.saved}
        for key, tensor in self.moments.tensors().items():
            name = key.partition(".")[2]
            saved[key] = self.whole(name, tensor) if tensor.dim() else tensor
        return saved | self._scale_tensors()

    def parts(self) -> dict[str, Tensor]:
        """The same of a sharded module as slices on the host, copied; counters are as they are."""
        masters = {f"master.{name}": self.masters[name].detach() for name in self.saved}
        return {
            key: self.on_host(key.partition(".")[2], tensor) if tensor.dim() else tensor.clone()
            for key, tensor in (masters | self.moments.tensors() | self._scale_tensors()).items()
        }

    def _scale_tensors(self) -> dict[str, Tensor]:
        return {} if self.loss_scale is None else self.loss_scale.tensors()

    def on_host(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of this rank's slice of a tensor that is sharded as that parameter."""
        like = self.parameters[name]
        assert isinstance(like, DTensor), "only sharded parameters have slices"
        return on_host(local(tensor), like)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of which this rank holds a slice as it does of that parameter; on the host, if it was gathered."""
        return whole(local(tensor), self.parameters[name]).cpu() if self.is_sharded else tensor

    @torch.no_grad()
    def assign(self, name: str, value: Tensor) -> None:
        """A parameter's new value, as much of it as this rank has."""
        local(self.parameters[name].detach()).copy_(value)
        if name in self.rounded:
            self.masters[name].copy_(value)

    def part_of_key(self, key: str, tensor: Tensor) -> Tensor:
        """This rank's part of what `tensors` gave under that key."""
        return self.part_of(key.partition(".")[2], tensor) if tensor.dim() else tensor

    def part_of(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a tensor that is sharded as that parameter."""
        return part_of(value, self.parameters[name]) if self.is_sharded else value

    @torch.no_grad()
    def load_parts(self, saved: dict[str, Tensor]) -> None:
        """This rank's parts of what `tensors` gave."""
        for name in self.saved:
            local(self.parameters[name].detach()).copy_(saved[f"master.{name}"])
        for name in self.rounded:
            self.masters[name].copy_(saved[f"master.{name}"])
        moments = {key: tensor for key, tensor in saved.items() if not key.startswith("master.")}
        self.moments.load(moments, {name: local(master.detach()) for name, master in self.masters.items()})
        if self.loss_scale is not None:
            self.loss_scale.load(saved)
