"""AdamW's two moments per weight: in float32 on the device, in host memory between updates, or in 8 bits each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Kind = Literal["float32", "int8", "host"]
BLOCK = 256  # weights that share a scale
SLICE = 1 << 26  # weights whose moments are unpacked at a time: 256 MiB for each temporary


class Moments(Protocol):
    """What an optimizer needs of them. `update` changes masters in place by their gradients."""

    def bytes_to_come(self, name: str, master: Tensor) -> int:
        """On the device, at this parameter's first update; 0 after it."""
        ...

    def update(self, masters: Mapping[str, Tensor], lr: float) -> None: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, saved: dict[str, Tensor], masters: Mapping[str, Tensor]) -> None: ...


def make_moments(kind: Kind, *, betas: tuple[float, float], weight_decay: float, is_cuda: bool) -> Moments:
    match kind:
        case "float32":
            return FloatMoments(betas, weight_decay, is_cuda)
        case "host":
            return HostMoments(betas, weight_decay, is_cuda)
        case "int8":
            return EightBitMoments(betas, weight_decay)


class FloatMoments:
    """Both moments in float32 (the master's own type, if wider) on the weights' device."""

    def __init__(self, betas: tuple[float, float], weight_decay: float, is_cuda: bool) -> None:
        self.betas, self.weight_decay, self.is_cuda = betas, weight_decay, is_cuda
        self.step: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def update(self, masters: Mapping[str, Tensor], lr: float) -> None:
        for name, master in masters.items():
            if name not in self.step:
                self.step[name] = self.counter(master)
                self.first[name], self.second[name] = self.fresh(master), self.fresh(master)
        self.apply(masters, [self.first[name] for name in masters], [self.second[name] for name in masters], lr)

    def bytes_to_come(self, name: str, master: Tensor) -> int:
        return 0 if name in self.step else 2 * master.numel() * master.dtype.itemsize

    def counter(self, master: Tensor) -> Tensor:
        """Where the library keeps it: the fused kernel counts on the device."""
        return torch.zeros((), dtype=torch.float32, device=master.device if self.is_cuda else "cpu")

    def fresh(self, master: Tensor) -> Tensor:
        return torch.zeros_like(master)

    @torch.no_grad()
    def apply(self, masters: Mapping[str, Tensor], first: list[Tensor], second: list[Tensor], lr: float) -> None:
        adamw(
            list(masters.values()),
            [gradient_of(master) for master in masters.values()],
            first,
            second,
            [],
            [self.step[name] for name in masters],
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        parts = (("step", self.step), ("exp_avg", self.first), ("exp_avg_sq", self.second))
        return {f"{key}.{name}": value for key, values in parts for name, value in values.items()}

    def load(self, saved: dict[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        for name, master in masters.items():
            if f"step.{name}" not in saved:
                continue
            self.step[name] = self.counter(master).copy_(saved[f"step.{name}"])
            self.first[name] = self.fresh(master).copy_(saved[f"exp_avg.{name}"])
            self.second[name] = self.fresh(master).copy_(saved[f"exp_avg_sq.{name}"])


class HostMoments(FloatMoments):
    """Both moments in host memory, pinned where a GPU reads them; one parameter's at a time visit the device.

    The arithmetic is that of `FloatMoments`, bit for bit.
    """

    def bytes_to_come(self, name: str, master: Tensor) -> int:  # noqa: ARG002
        return 0

    def fresh(self, master: Tensor) -> Tensor:
        return torch.zeros(master.shape, dtype=master.dtype, device="cpu", pin_memory=master.is_cuda)

    @torch.no_grad()
    def apply(self, masters: Mapping[str, Tensor], first: list[Tensor], second: list[Tensor], lr: float) -> None:
        for (name, master), m, v in zip(masters.items(), first, second, strict=True):
            visiting = [x.to(master.device, non_blocking=True) for x in (m, v)]
            super().apply({name: master}, [visiting[0]], [visiting[1]], lr)
            for home, x in zip((m, v), visiting, strict=True):
                home.copy_(x, non_blocking=True)
        if self.is_cuda:  # what was copied without waiting must have arrived before anyone reads it
            torch.cuda.synchronize()


class EightBitMoments:
    """Both moments in 8 bits with a float32 scale per block of 256 weights: 2.03 bytes a weight instead of 8.

    The first moment is scale·sign·(|code|/127)², the second scale·(code/255)⁴, so that small entries of a block keep
    their relative precision. Rounding is random with the exact value as its mean, because a second moment moves by
    0.1 % an update and the nearest code would hold it still. The random numbers are a function of (update, parameter):
    the same run gives the same bits. A second moment above 0 never rounds to 0, which would make a huge step.
    """

    def __init__(self, betas: tuple[float, float], weight_decay: float) -> None:
        self.betas, self.weight_decay = betas, weight_decay
        self.step = torch.zeros((), dtype=torch.int64)
        self.codes: dict[str, Tensor] = {}  # "m.name" int8, "v.name" uint8, "m_scale.name", "v_scale.name" float32

    @torch.no_grad()
    def update(self, masters: Mapping[str, Tensor], lr: float) -> None:
        self.step += 1
        for index, (name, master) in enumerate(masters.items()):
            if f"m.{name}" not in self.codes:
                self.codes |= empty_codes(name, master)
            seed = (int(self.step) * 1_000_003 + index) % (1 << 62)
            noise = torch.Generator(device=master.device).manual_seed(seed)
            flat, gradient = master.view(-1), gradient_of(master).reshape(-1)
            for start in range(0, flat.numel(), SLICE):
                part = slice(start, min(start + SLICE, flat.numel()))
                self.update_part(name, part, flat[part], gradient[part], lr, noise)

    def bytes_to_come(self, name: str, master: Tensor) -> int:
        return 0 if f"m.{name}" in self.codes else int(master.numel() * (2 + 8 / BLOCK))

    def update_part(
        self, name: str, part: slice, weight: Tensor, gradient: Tensor, lr: float, noise: torch.Generator
    ) -> None:
        """AdamW (Loshchilov and Hutter, 2019, algorithm 2) on one slice, between unpacking and packing its moments."""
        beta1, beta2 = self.betas
        t = int(self.step)
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        m_code, v_code = self.codes[f"m.{name}"][part], self.codes[f"v.{name}"][part]
        m_scale, v_scale = self.codes[f"m_scale.{name}"][blocks], self.codes[f"v_scale.{name}"][blocks]
        m = unpack_first(m_code, m_scale).lerp_(gradient.float(), 1 - beta1)
        v = unpack_second(v_code, v_scale).mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
        weight.mul_(1 - lr * self.weight_decay)
        denominator = (v / (1 - beta2**t)).sqrt_().add_(1e-8)
        weight.addcdiv_(m.to(weight.dtype), denominator.to(weight.dtype), value=-lr / (1 - beta1**t))
        pack_first(m, m_code, m_scale, noise)
        pack_second(v, v_code, v_scale, noise)

    def tensors(self) -> dict[str, Tensor]:
        return {"step": self.step} | {f"eight_bit.{name}": code for name, code in self.codes.items()}

    def load(self, saved: dict[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        if "step" in saved:
            self.step.copy_(saved["step"])
        for name, master in masters.items():
            if f"eight_bit.m.{name}" in saved:
                self.codes |= {key: saved[f"eight_bit.{key}"].to(master.device).clone() for key in keys_of(name)}


def gradient_of(master: Tensor) -> Tensor:
    assert master.grad is not None, "only masters with a gradient are updated"
    return master.grad


# ------------------------------------------------------------------ 8-bit codes


def keys_of(name: str) -> tuple[str, str, str, str]:
    return f"m.{name}", f"v.{name}", f"m_scale.{name}", f"v_scale.{name}"


def empty_codes(name: str, master: Tensor) -> dict[str, Tensor]:
    n, device = master.numel(), master.device
    blocks = -(-n // BLOCK)
    made = (
        torch.zeros(n, dtype=torch.int8, device=device),
        torch.zeros(n, dtype=torch.uint8, device=device),
        torch.zeros(blocks, device=device),
        torch.zeros(blocks, device=device),
    )
    return dict(zip(keys_of(name), made, strict=True))


def per_weight(scale: Tensor, n: int) -> Tensor:
    """One scale per block -> one per weight."""
    return scale[:, None].expand(-1, BLOCK).reshape(-1)[:n]


def block_max(values: Tensor) -> Tensor:
    """Largest of each block of 256; the last block may be short."""
    short = -len(values) % BLOCK
    padded = torch.nn.functional.pad(values, (0, short)) if short else values
    return padded.view(-1, BLOCK).amax(1)


def unpack_first(code: Tensor, scale: Tensor) -> Tensor:
    x = code.float() / 127
    return x.abs_().mul_(code.sign()).mul_(code.float().abs_() / 127).mul_(per_weight(scale, len(code)))


def unpack_second(code: Tensor, scale: Tensor) -> Tensor:
    return (code.float() / 255).pow_(4).mul_(per_weight(scale, len(code)))


def pack_first(values: Tensor, code: Tensor, scale: Tensor, noise: torch.Generator) -> None:
    scale.copy_(block_max(values.abs()))
    size = values.abs() / per_weight(scale, len(values)).clamp(min=torch.finfo(torch.float32).tiny)
    code.copy_(random_code(size, levels=127, power=2, noise=noise) * values.sign())


def pack_second(values: Tensor, code: Tensor, scale: Tensor, noise: torch.Generator) -> None:
    scale.copy_(block_max(values))
    size = values / per_weight(scale, len(values)).clamp(min=torch.finfo(torch.float32).tiny)
    drawn = random_code(size, levels=255, power=4, noise=noise)
    code.copy_(torch.where(values > 0, drawn.clamp(min=1), drawn))


def random_code(size: Tensor, *, levels: int, power: int, noise: torch.Generator) -> Tensor:
    """A code c with E[(c/levels)^power] = size, one of the two codes around it; size in [0, 1]."""
    below = (size.clamp(max=1).pow(1 / power) * levels).floor_().clamp_(max=levels - 1)
    low, high = (below / levels).pow_(power), ((below + 1) / levels).pow_(power)
    chance = size.sub(low).div_(high.sub_(low))
    return below.add_(torch.rand(len(size), generator=noise, device=size.device) < chance)
