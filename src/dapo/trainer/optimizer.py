"""AdamW on float32 masters, with gradients accumulated in float32, clipping, and refusal of non-finite gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn import Parameter

from dapo.trainer.moments import Kind, make_moments


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    gradient_norm: float  # before clipping
    is_skipped: bool  # the gradient was not finite; nothing changed


def warmup_lr(lr: float, step: int, warmup_steps: int) -> float:
    """lr·min(1, k/W) for step k = 1, 2, …: no update ever runs at lr 0."""
    return lr * min(1.0, step / warmup_steps) if warmup_steps else lr


class Optimizer:
    """Owns the masters of one module's parameters.

    Parameters of 16 bits have a float32 master, rounded in place into the same storage after each step; wider ones are
    their own master. A 16-bit gradient moves into its master as soon as the backward pass has made it, so that the
    16-bit gradients of all parameters never exist together; wider ones accumulate where they are.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        grad_clip: float,
        moments: Kind = "float32",
    ) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.masters = {
            name: p if p.dtype.itemsize >= 4 else Parameter(p.detach().float()) for name, p in self.parameters.items()
        }
        self.grad_clip = grad_clip
        is_cuda = any(p.is_cuda for p in self.parameters.values())
        self.moments = make_moments(moments, betas=betas, weight_decay=weight_decay, is_cuda=is_cuda)
        self.rounded = [name for name, p in self.parameters.items() if self.masters[name] is not p]
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

    @torch.no_grad()
    def step(self, lr: float) -> UpdateOutcome:
        """Clip, update, round into the parameters. The host waits for the device once, for the gradient's norm."""
        masters = {name: master for name, master in self.masters.items() if master.grad is not None}
        if not masters:
            return UpdateOutcome(0.0, is_skipped=False)
        grads = [master.grad for master in masters.values() if master.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        norm = float(total)
        if not isfinite(norm):
            self.zero_grad()
            return UpdateOutcome(norm, is_skipped=True)
        coefficient = self.grad_clip / (total + 1e-6)
        if float(coefficient) < 1:
            torch._foreach_mul_(grads, coefficient)
        self.moments.update(masters, lr)
        if self.rounded:
            torch._foreach_copy_(
                [self.parameters[name] for name in self.rounded], [self.masters[name] for name in self.rounded]
            )
        self.zero_grad()
        return UpdateOutcome(norm, is_skipped=False)

    def bytes_to_come(self) -> int:
        """Gradients and moments that are not there yet and will be by the end of the next update."""
        return sum(
            (master.numel() * master.dtype.itemsize if master.grad is None else 0)
            + self.moments.bytes_to_come(name, master)
            for name, master in self.masters.items()
        )

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs beside the module's own weights."""
        return {f"master.{name}": self.masters[name].detach() for name in self.rounded} | self.moments.tensors()

    @torch.no_grad()
    def load_tensors(self, saved: dict[str, Tensor]) -> None:
        for name in self.rounded:
            self.masters[name].copy_(saved[f"master.{name}"])
            self.parameters[name].copy_(self.masters[name])
        self.moments.load(saved, self.masters)
