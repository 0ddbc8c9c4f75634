"""Where a model is computed and in which numbers: `auto` as a device and a dtype."""

from __future__ import annotations

import torch

from dapo.errors import EngineError


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
