"""What all sides of a benchmark have in common: the model's shape or folder, the machine, the versions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config.model_shapes import BENCH_SHAPES, ModelShape, shape_of
from dapo.errors import ConfigError

if TYPE_CHECKING:
    import torch

# What a card sustains: bytes per second and dense bf16 operations per second, measured.
LIMITS = {"NVIDIA H200": (4.3e12, 790e12)}


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """What all sides have in common."""

    shape: ModelShape
    folder: str
    device: str

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def model(self, attention: str) -> Any:
        """A fresh model on the device: the folder's, or one of the shape with random weights."""
        if self.folder:
            from transformers import AutoModelForCausalLM

            from dapo.models.load import load_pretrained

            if attention == "sdpa":
                model: Any = AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=self.dtype, attn_implementation="sdpa"
                )
                return model.to(self.device)
            return load_pretrained(
                AutoModelForCausalLM, self.folder, dtype=self.dtype, device=self.device, revision=None
            )
        from dapo.models.random_model import random_model

        return random_model(self.shape, dtype=self.dtype, device=self.device, attention=attention)

    def save_shape(self, folder: Path) -> None:
        """A config.json of the shape, for a peer that makes random weights itself."""
        from dapo.models.random_model import random_config

        config = random_config(self.shape)
        config.architectures = ["Qwen2ForCausalLM" if self.shape.has_qkv_bias else "LlamaForCausalLM"]
        config.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        import torch

        name = device_name(self.device)
        return {
            "model": self.folder or "random weights",
            "parameters": self.shape.parameters,
            "device": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "limit_flops": LIMITS[name][1] if name in LIMITS else None,
            "versions": versions_of("dapo", "torch", "transformers"),
        }


@dataclass(frozen=True, slots=True)
class TrainSetting(BenchSetup):
    """What all training passes have in common besides."""

    repeats: int  # updates that are timed
    moments: str  # AdamW's, of this project


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


def machine_name() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def versions_of(*packages: str) -> dict[str, str]:
    return {package: version_of(package) for package in packages}


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout, without installation
        return "source"


def choose_shape(name: str, folder: str) -> ModelShape:
    found = shape_of(folder) if folder else BENCH_SHAPES.get(name)
    if found is None:
        what = f"--model {folder}: has no config.json of a known kind." if folder else f"--shape {name}: unknown."
        raise ConfigError(what, remedy=f"Use --shape {', '.join(BENCH_SHAPES)}, or --model with a model's folder.")
    return found
