"""The engine that a config names: one per rank, all of them as one."""

from __future__ import annotations

import torch

from dapo.config.schema import Config
from dapo.distributed.world import ALONE, World
from dapo.errors import ConfigError
from dapo.models.device import allowed_fraction
from dapo.models.policy import Policy
from dapo.models.triton_support import is_interpreted
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import Engine, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.exact import ExactPass
from dapo.rollout.local.float8 import FLOAT8_CAPABILITY
from dapo.rollout.plain.engine import PlainEngine
from dapo.rollout.shared import SharedEngine
from dapo.rollout.vllm.engine import VllmEngine


def refuse_layout(config: Config, world: World) -> None:
    """Refuse engines that cannot share the work of so many ranks."""
    engine, together = config.rollout.engine, config.rollout.tensor_parallel
    if engine == "plain" and world.size > 1:
        raise ConfigError(
            f"rollout.engine = plain: is not built for {world.size} ranks.", remedy="Use local, or one process."
        )
    if world.size % together:
        raise ConfigError(
            f"rollout.tensor_parallel = {together}: {world.size} ranks cannot be divided into groups of {together}.",
            remedy="Start a multiple of it, with cluster.backend = torchrun or ray.",
        )


def refuse_inexact(config: Config, device: str, dtype: torch.dtype) -> None:
    """Refuse `rollout.exact` where its kernels do not run. (Triton's interpreter is for tests.)"""
    if config.rollout.exact and not is_interpreted() and not (device == "cuda" and dtype.itemsize == 2):
        shown = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"rollout.exact = true: is for CUDA in 16 bits, and this run is in {shown} on {device}.",
            remedy="Leave it out. In float32 on a CPU the two differ by less than 1e-5 anyway."
            if device == "cpu"
            else 'Set model.dtype = "auto", or rollout.exact = false.',
        )


def refuse_float8(config: Config, device: str, dtype: torch.dtype) -> None:
    """Refuse `rollout.quantization` where a GPU has no such product. A CPU computes the same slowly, in float32."""
    if config.rollout.quantization == "none" or device != "cuda":
        return
    capability = torch.cuda.get_device_capability()
    if capability < FLOAT8_CAPABILITY or dtype != torch.bfloat16:
        shown = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"rollout.quantization = {config.rollout.quantization}: is for bfloat16 on a GPU of compute capability 8.9 "
            f"or more; this run is in {shown} on one of {capability[0]}.{capability[1]}.",
            remedy='Set rollout.quantization = "none", or model.dtype = "auto" on such a GPU.',
        )


def make_exact(config: Config, policy: Policy) -> ExactPass | None:
    """What makes the policy's log-probs those of the engine, to the last bit; None where that is not asked for."""
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    return ExactPass(policy, max_tokens=longest) if config.rollout.exact else None


def make_engine(config: Config, policy: Policy, sampling: SamplingParams, world: World = ALONE) -> Engine:
    """The engine the config names; with several ranks, all of them as one."""
    concurrent = config.rollout.max_concurrent_sequences
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    drafting = Drafting(config.rollout.draft_tokens, config.rollout.draft_below_rows)
    match config.rollout.engine:
        case "vllm":
            together = config.rollout.tensor_parallel
            vllm = VllmEngine(
                policy,
                sampling=sampling,
                max_concurrent=-(-concurrent * together // world.size),
                max_tokens=longest,
                memory_fraction=config.rollout.vllm.gpu_memory_utilization * allowed_fraction(policy.device),
                tensor_parallel=together,
            )
            if world.size == 1:
                return vllm
            return SharedEngine(vllm, world, max_concurrent=concurrent, ranks_per_engine=together)
        case "plain":
            return PlainEngine(
                policy, sampling=sampling, max_concurrent=concurrent, max_tokens=longest, drafting=drafting
            )
        case "local":
            gib, slots = config.rollout.kv_cache_gib, -(-concurrent // world.size)
            is_exact = config.rollout.exact
            own = LocalEngine(
                policy,
                sampling=sampling,
                max_concurrent=slots,
                max_tokens=longest,
                kv_gib=gib,
                ops="triton" if is_exact else "auto",
                drafting=drafting,
                is_exact=is_exact,
                is_float8=config.rollout.quantization == "fp8",
            )
            return own if world.size == 1 else SharedEngine(own, world, max_concurrent=concurrent)
