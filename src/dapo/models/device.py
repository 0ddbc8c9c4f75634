"""Where a model is computed, in which numbers, and in how much memory: `auto` as a device and a dtype."""

from __future__ import annotations

import torch

from dapo.config.machine import CONTEXT_BYTES, GIB
from dapo.errors import EngineError


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A host's tensor on the device. From memory that is not pinned the copy would wait for all kernels before it."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    if wanted == "mps":
        raise EngineError(
            "model.device = mps: Apple GPUs are not supported: their torch backend lacks float64 and 64-bit integer "
            "kernels that the sampling noise needs.",
            remedy="Use cpu; the quickstart takes minutes there.",
        )
    if not available.get(wanted):
        raise EngineError(
            f"device {wanted}: this machine's torch sees no such device.", remedy="Use auto, cpu or cuda."
        )
    return wanted


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if wanted == "float16" and device == "cpu":
        raise EngineError(
            "model.dtype = float16: is for GPUs; on a CPU its kernels are slow or missing, and nothing is gained.",
            remedy="Use auto or float32 here, or run on a machine with a GPU.",
        )
    return {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
    }[wanted]


def limit_memory(gib: float | None, device: str) -> None:
    """Let this process take no more of its GPU, what CUDA keeps for itself included; None: no limit."""
    if gib is None:
        return
    if device != "cuda":
        raise EngineError(
            f"model.gpu_memory_gib = {gib:g}: limits a GPU's memory, and the run is on the {device}.",
            remedy="Leave it out.",
        )
    _, total = torch.cuda.mem_get_info()
    if gib * GIB > total:
        raise EngineError(
            f"model.gpu_memory_gib = {gib:g}: this GPU has {total / GIB:.1f} GiB.", remedy="Lower it, or leave it out."
        )
    torch.cuda.set_per_process_memory_fraction((gib * GIB - CONTEXT_BYTES) / total)


def allowed_fraction(device: torch.device) -> float:
    """Of its GPU, by `limit_memory`; 1 elsewhere."""
    return float(torch.cuda.get_per_process_memory_fraction(device)) if device.type == "cuda" else 1.0


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU that this process can still allocate, and that it may use in all."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(allowed_fraction(device) * total)
    return min(free, max(0, allowed - reserved)) + reserved - allocated, min(total, allowed)
