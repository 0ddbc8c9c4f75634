"""host.c, attention.c and decode.c, compiled on first use for the very CPU they run on, and kept in the user's cache.

Where there is no C compiler, or with DAPO_COMPILE=0, `library` is None and the same operations in torch are used
(host.py, rollout/local/block_ops.py, SDPA), which are their reference.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from dapo.files import written_aside

SOURCES = tuple(Path(__file__).with_name(name) for name in ("host.c", "attention.c", "decode.c"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("exponential.h", "layer.h", "product.h"))
# Sums may be taken in the order of vectors; NaN and infinity must stay what they are, so not -ffast-math.
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-freciprocal-math", "-ffp-contract=fast",
)  # fmt: skip
# The first that the compiler knows. GCC takes half of a wide CPU's vectors unless it is told.
TARGETS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())

pointer, number, count = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
SIGNATURES: dict[str, list[Any]] = {
    "norm_forward": [pointer] * 3 + [number] + [pointer] * 3 + [count] * 2,
    "norm_backward": [pointer] * 7 + [count] * 2,
    "gated_forward": [pointer] * 3 + [count] * 3,
    "gated_backward": [pointer] * 6 + [count],
    "rotate": [pointer] * 3 + [number, pointer] + [count] * 3,
    "logit_scores": [pointer] * 2 + [number] + [pointer] * 3 + [count] * 2,
    "logit_gradient": [pointer] * 4 + [number] + [count] * 2,
    "mix": [pointer] * 7 + [number] * 2 + [pointer] * 4 + [count] * 6,
    "panels": [pointer] * 2 + [count] * 2,
    "forward_scratch": [pointer] + [count] * 2,
    "forward": [pointer] * 2 + [count, pointer] + [count] * 2 + [pointer] * 2,
    "draw": [pointer, number] + [pointer] * 5 + [count] * 3,
    "attention_scratch": [count] * 2,
    "attention_forward": [pointer] * 7 + [number] + [pointer] * 3 + [count] * 5,
    "attention_backward": [pointer] * 10 + [number] + [pointer] * 4 + [count] * 5,
}
RESULTS = {"forward_scratch": count, "attention_scratch": count}


# ------------------------------------------------------------------ compiling


@cache
def library() -> ctypes.CDLL | None:
    """The compiled parts, or None where it cannot be had."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if os.environ.get("DAPO_COMPILE", "1") == "0" or compiler is None or os.name != "posix":
        return None
    try:
        try:
            return load(compiler, cache_folder())
        except (OSError, RuntimeError):  # no home, or a cache that is full, read-only or holds a broken file
            with tempfile.TemporaryDirectory() as folder:
                return load(compiler, Path(folder))
    except (OSError, subprocess.SubprocessError):
        return None


def load(compiler: str, folder: Path) -> ctypes.CDLL:
    path = folder / f"host-{fingerprint(compiler)}.so"
    if not path.exists():
        build(compiler, path)
    found = ctypes.CDLL(str(path))
    for name, types in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, RESULTS.get(name)
    return found


def cache_folder() -> Path:
    """A folder that only this user can write to: its files are executed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}")
    return folder


def fingerprint(compiler: str) -> str:
    """Of all that decides what comes out: the source, the flags, the compiler and the CPU, which a home may outlive."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    sources = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    parts = [*sources, repr((FLAGS, TARGETS)).encode(), version, cpu().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), platform.processor(), *dict.fromkeys(named)])


def build(compiler: str, path: Path) -> None:
    """Another process sees the whole library or none: half of one kills whoever loads it."""
    with written_aside(path) as aside:
        for target in TARGETS:
            command = [compiler, *FLAGS, *target, "-o", str(aside), *map(str, SOURCES), "-lm"]
            if subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0:
                return
        raise OSError(f"{compiler} cannot compile {SOURCES[0].parent}")
