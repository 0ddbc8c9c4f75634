"""What one rank of a sharded run holds, on one GPU without the others: for `tools/capped_recipes.py`.

Held for real: this rank's slices of master weights, gradients and moments, updated by the real optimizer; the layers
that FSDP2 gathers, of which two are there at a time, so all layers of the stand-in are one and the same, and another
one's weights are held beside it; the output head and embeddings, which stay gathered; activations of a whole
micro-batch through all layers, forward and backward; the local engine with its KV cache, decoding. Held as an empty
block: the rest of the engine's gathered weights, or all that vLLM would take. Nothing is exchanged, so buffers of
NCCL are not there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

LR = 1e-6


def share(config: Any, shape: Any, *, gib: float, device: str, steps: int) -> dict[str, Any]:
    """Some steps of one rank: a rollout, where the engine is local, and an update."""
    import torch

    from dapo.config.machine import GIB
    from dapo.learner.activations import checkpoint_layers
    from dapo.models.device import limit_memory

    if device == "cuda":
        limit_memory(gib, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = one_layer_many_times(shape, dtype, device)
    if config.train.gradient_checkpointing:
        checkpoint_layers(policy)
    slices = slices_of(shape, config.cluster.gpus, device)
    optimizer = optimizer_of(slices, config)
    held = [empty(layer_bytes(policy), device)]
    kv_bytes, engine = 0, None
    if config.rollout.engine == "vllm":
        held.append(
            empty(int(config.rollout.vllm.gpu_memory_utilization * gib * GIB) if device == "cuda" else 0, device)
        )
        kv_bytes = len(held[-1]) - shape.parameters * dtype.itemsize // config.rollout.tensor_parallel
    else:
        there = sum(parameter.nbytes for parameter in policy.parameters())
        held.append(empty(max(0, shape.parameters * dtype.itemsize - there), device))
        engine = engine_of(policy, config)
        kv_bytes = engine._decoder.cache.data.nbytes
    batch = micro_batch(config, shape, policy.device)
    for step in range(steps):
        if engine is not None:
            roll_out(engine, config, shape, step)
        update(policy, batch, slices, optimizer)
    return {
        "ranks": config.cluster.gpus,
        "weights": "random",
        "steps": steps,
        "kv_cache_gib": round(max(0, kv_bytes) / GIB, 2),
    }


def one_layer_many_times(shape: Any, dtype: Any, device: str) -> Any:
    """A policy of the shape whose layers are one module: as many activations, the weights of one layer."""
    import torch

    from dapo.models.fused_layers import fuse_layers
    from dapo.models.packed_attention import PACKED_ATTENTION
    from dapo.models.policy import Policy
    from dapo.models.random_model import random_model

    model = random_model(replace(shape, layers=1), dtype=dtype, device=device, attention=PACKED_ATTENTION)
    backbone = model.get_decoder()
    backbone.layers = torch.nn.ModuleList([backbone.layers[0]] * shape.layers)
    backbone.config.num_hidden_layers = model.config.num_hidden_layers = shape.layers
    for settings in {id(c): c for c in (backbone.config, model.config)}.values():
        settings.layer_types = ["full_attention"] * shape.layers
    policy = Policy(model.eval(), None)
    policy.eos_ids = ()
    fuse_layers(policy.backbone)
    return policy


def slices_of(shape: Any, ranks: int, device: str) -> list[Any]:
    """This rank's part of the float32 masters, a tensor per layer."""
    import torch

    size = shape.parameters // ranks // shape.layers
    return [torch.nn.Parameter(torch.zeros(size, device=device)) for _ in range(shape.layers)]


def optimizer_of(slices: list[Any], config: Any) -> Any:
    from dapo.learner.optimizer import Optimizer

    train = config.train
    return Optimizer(
        [(str(i), part) for i, part in enumerate(slices)],
        betas=train.betas,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        moments=train.moments,
    )


def empty(n_bytes: int, device: str) -> Any:
    import torch

    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def layer_bytes(policy: Any) -> int:
    return sum(parameter.nbytes for parameter in policy.backbone.layers[0].parameters())


def engine_of(policy: Any, config: Any) -> Any:
    """This rank's engine, with its part of the concurrent responses."""
    from dapo.rollout.engine import SamplingParams
    from dapo.rollout.local.engine import LocalEngine

    slots = -(-config.rollout.max_concurrent_sequences // config.cluster.gpus)
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    gib = config.rollout.kv_cache_gib
    return LocalEngine(policy, sampling=SamplingParams(), max_concurrent=slots, max_tokens=longest, kv_gib=gib)


def roll_out(engine: Any, config: Any, shape: Any, step: int) -> None:
    """All slots to the limit, so that every page is used; one response after the other is dropped at the end."""
    from dapo.rollout.engine import NoiseKey, Request

    n_prompt = max(1, config.limits.max_prompt_tokens // 2)
    prompt = tuple(1 + i % (shape.vocabulary - 1) for i in range(n_prompt))
    engine.submit(
        [
            Request(i, prompt, NoiseKey(step, "share", "p", 0, i), config.limits.max_response_tokens, group=0)
            for i in range(engine.max_concurrent)
        ]
    )
    while engine.n_in_flight or engine.n_waiting:
        engine.advance()


def micro_batch(config: Any, shape: Any, device: Any) -> Any:
    """Rows at the limit, as many as a micro-batch holds, at least one."""
    import numpy as np

    from dapo.models.packing import pack

    limits = config.limits
    rows = max(1, config.train.tokens_per_microbatch // (limits.max_prompt_tokens + limits.max_response_tokens))
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, shape.vocabulary, limits.max_prompt_tokens).tolist()) for _ in range(rows)]
    responses = [rng.integers(0, shape.vocabulary, limits.max_response_tokens).astype(np.int32) for _ in range(rows)]
    return pack(prompts, responses, device)


def update(policy: Any, batch: Any, slices: list[Any], optimizer: Any) -> None:
    """Forward and backward of a micro-batch beside the gradients' slices, and a step of the optimizer on them."""
    import torch

    for part in slices:
        part.grad = torch.zeros_like(part)
    logp, _ = policy(batch, temperature=1.0)
    (-logp.mean()).backward()
    for parameter in policy.parameters():
        parameter.grad = None  # the ranks would have added it to their slices, layer by layer
    for part in slices:
        part.grad.fill_(1e-3)
    optimizer.step(LR)
