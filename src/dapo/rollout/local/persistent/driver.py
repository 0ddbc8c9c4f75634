"""CUDA C++ at run time: compiled by NVRTC, launched by the driver, both of which torch has loaded.

A launch takes torch's current stream, so a CUDA graph can capture it. What was compiled is kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dapo.files import written_aside
from dapo.models.kernels.build import cache_folder

MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DriverError(RuntimeError):
    """NVRTC or the driver is not there, or refuses."""


class Kernel:
    def __init__(self, function: ctypes.c_void_p) -> None:
        self.function = function

    def launch(self, blocks: int, threads: int, shared_bytes: int, arguments: ctypes.Structure) -> None:
        """All blocks at once, or none: they wait for each other."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(
            driver().cuLaunchCooperativeKernel(
                self.function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters
            )
        )


def compiled(source: Path, name: str, options: Sequence[str], shared_bytes: int) -> Kernel:
    """The kernel of that name in a file, behind the `cuda.h` that lies beside it, for the current device."""
    text = source.with_name("cuda.h").read_text(encoding="utf-8") + source.read_text(encoding="utf-8")
    major, minor = torch.cuda.get_device_capability()
    function = loaded_function(text, name, (f"--gpu-architecture=sm_{major}{minor}", *options))
    check(driver().cuFuncSetAttribute(function, MOST_SHARED, shared_bytes))
    return Kernel(function)


def loaded_function(text: str, name: str, options: Sequence[str]) -> ctypes.c_void_p:
    path = kept_at(text, name, options)
    if path is not None and path.exists():
        try:
            return function_of(path.read_bytes(), name)
        except (OSError, DriverError):  # unreadable, or not what it was: made again
            pass
    binary = compile_text(text, f"{name}.cu", options)
    if path is not None:
        with suppress(OSError), written_aside(path) as aside:  # full, or read-only
            aside.write_bytes(binary)
    return function_of(binary, name)


def function_of(binary: bytes, name: str) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), binary))
    check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return function


def kept_at(text: str, name: str, options: Sequence[str]) -> Path | None:
    """Where the compiled text is kept; None if there is no home, or one that others may write to."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    everything = repr((text, tuple(options), major.value, minor.value)).encode()
    try:
        return cache_folder() / f"{name}-{hashlib.sha256(everything).hexdigest()[:16]}.cubin"
    except OSError:
        return None


def compile_text(text: str, name: str, options: Sequence[str]) -> bytes:
    nvrtc, program, size = compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None):
        raise DriverError("NVRTC cannot begin a program")
    try:
        if code := nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise DriverError(f"NVRTC ({code}): {log.value.decode(errors='replace')}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"CUDA: {(text.value or b'unknown error').decode()} ({code})")


@cache
def driver() -> Any:
    return loaded("libcuda.so.1")


@cache
def compiler() -> Any:
    return loaded(f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}")


def loaded(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"{name} cannot be loaded: {error}") from error
