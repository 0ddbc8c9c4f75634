"""AdamW on float32 masters, with gradients accumulated in float32, clipping, and refusal of non-finite gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


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
    their own master. `accumulate` is called after each backward pass.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        grad_clip: float,
    ) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.masters = {
            name: p if p.dtype.itemsize >= 4 else Parameter(p.detach().float()) for name, p in self.parameters.items()
        }
        self.grad_clip = grad_clip
        is_cuda = any(p.is_cuda for p in self.parameters.values())
        self.adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=0.0,
            betas=betas,
            weight_decay=weight_decay,
            fused=is_cuda,
            foreach=not is_cuda,
        )

    def accumulate(self) -> None:
        """Move 16-bit gradients into their float32 masters; wider ones accumulate where they are."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def step(self, lr: float) -> UpdateOutcome:
        masters = [master for master in self.masters.values() if master.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.grad_clip)) if masters else 0.0
        if not torch.isfinite(torch.tensor(norm)):
            self.zero_grad()
            return UpdateOutcome(norm, is_skipped=True)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
        self.zero_grad()
        return UpdateOutcome(norm, is_skipped=False)

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs beside the module's own weights."""
        saved: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                saved[f"master.{name}"] = master.detach()
            for key, value in self.adam.state.get(master, {}).items():
                saved[f"{key}.{name}"] = value
        return saved

    def load_tensors(self, saved: dict[str, Tensor]) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                with torch.no_grad():
                    master.copy_(saved[f"master.{name}"])
                    self.parameters[name].copy_(master)
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"step.{name}" in saved:
                at = {"step": torch.device("cpu") if not self.adam.defaults["fused"] else master.device}
                self.adam.state[master] = {
                    key: saved[f"{key}.{name}"].to(at.get(key, master.device)).clone() for key in keys
                }
