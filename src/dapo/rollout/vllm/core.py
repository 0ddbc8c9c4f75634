"""All calls into vLLM are in this one file.

So are the differences between the releases it is tested with (0.24 on CUDA, 0.32 on CPU). No server, no second process,
nothing pickled: weights are handed over as tensors.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dapo.errors import EngineError
from dapo.models.load import checkpoint_tensors, save_shape
from dapo.models.policy import Policy
from dapo.rollout.engine import SamplingParams
from dapo.rollout.vllm.response import Response

# In process, no usage statistics sent anywhere, nothing reachable from outside, and the model runner that both releases
# have and that knows log-probs after temperature.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CPU_BLOCK_TOKENS = 32
TOKENS_PER_STEP = {"cuda": 8192, "cpu": 2048}  # prompt and response tokens that one step may compute


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one step generated for one response."""

    tag: str
    tokens: Sequence[int]
    logp: Sequence[float]
    is_finished: bool
    why: str


class Owner(Protocol):
    """The engine whose responses are in flight in a vLLM."""

    def withdraw(self) -> None:
        """Take them all out: another engine becomes the owner."""
        ...


class VllmCore:
    """One vLLM with its model, its weights and its KV cache, driven step by step.

    Where several ranks hold one model together (`tensor_parallel`), each of them drives its part of it with the same
    requests in the same steps: vLLM's "external launcher", which needs no processes but the ranks.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_concurrent: int,
        max_tokens: int,
        memory_fraction: float,
        tensor_parallel: int = 1,
    ) -> None:
        vllm = import_vllm()
        self._vllm = vllm
        self._n_sent = 0
        self._owner: weakref.ref[Owner] | None = None
        self.in_flight: set[str] = set()  # tags of all responses inside vLLM
        self.device = policy.device.type
        with tempfile.TemporaryDirectory(prefix="dapo-vllm-") as folder, _random_state_kept():
            # vLLM reads a model's shape from a folder; the weights come from the policy itself.
            save_shape(policy, folder)
            try:
                config = self._configuration(
                    folder, policy, max_concurrent, max_tokens, memory_fraction, tensor_parallel
                )
                with _memory_of_its_own() if self.device == "cpu" and tensor_parallel > 1 else nullcontext():
                    self._engine: Any = vllm.LLMEngine.from_vllm_config(config, disable_log_stats=True)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise EngineError(
                    f"rollout.engine = vllm: vLLM {vllm.__version__} does not start with this model: {error}",
                    remedy="Change what it names (limits, gpu_memory_utilization), or set rollout.engine=local.",
                ) from error
        self._config = config
        self._runner: Any = self._engine.model_executor.driver_worker.model_runner

    def _configuration(
        self,
        folder: str,
        policy: Policy,
        max_concurrent: int,
        max_tokens: int,
        memory_fraction: float,
        tensor_parallel: int,
    ) -> Any:
        if policy.dtype not in DTYPES:
            raise EngineError(
                f"model.dtype = {str(policy.dtype).removeprefix('torch.')}: vLLM cannot compute in it.",
                remedy="Use bfloat16 or float32.",
            )
        positions = getattr(policy.config.get_text_config(), "max_position_embeddings", max_tokens)
        if max_tokens > positions:
            raise EngineError(
                f"limits.max_prompt_tokens + limits.max_response_tokens = {max_tokens}: the model has {positions} "
                "positions, and vLLM goes no further.",
                remedy=f"Lower them to {positions} together.",
            )
        is_cpu = self.device == "cpu"
        arguments: dict[str, Any] = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "generation_config": "vllm",  # no sampling defaults of the model's own
            "dtype": DTYPES[policy.dtype],
            "max_model_len": max_tokens,
            "max_num_seqs": max_concurrent,
            "max_num_batched_tokens": max(TOKENS_PER_STEP[self.device], max_concurrent),
            "gpu_memory_utilization": memory_fraction,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",  # after temperature: the distribution the token was drawn from
            "async_scheduling": False,  # a step returns its own tokens, so that each has the version it was drawn by
            "disable_log_stats": True,
            "seed": 0,
        }
        if tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "external_launcher"}
        if is_cpu:
            arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
        else:
            # Its default stops at 512, above which every kernel is launched one by one. It captures multiples of 16.
            arguments["compilation_config"] = {"max_cudagraph_capture_size": -(-max_concurrent // 16) * 16}
        config = self._vllm.EngineArgs(**arguments).create_engine_config()
        if config.model_config.using_transformers_backend():
            raise EngineError(
                f"rollout.engine = vllm: vLLM {self._vllm.__version__} has no {type(policy.base).__name__} of its own "
                "and would run Hugging Face's, whose classes it patches; the trainer's model would no longer run.",
                remedy="Use engine local if it knows the architecture, or another version of vLLM.",
            )
        if is_cpu:
            config.cache_config.kv_cache_memory_bytes = self._kv_bytes(
                config, max_concurrent, max_tokens, memory_fraction
            )
        return config

    def _kv_bytes(self, config: Any, max_concurrent: int, max_tokens: int, memory_fraction: float) -> int:
        """For every response at its limit, and a block more; at most the share of main memory."""
        model, parallel = config.model_config, config.parallel_config
        width = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
        per_block = CPU_BLOCK_TOKENS * width * model.get_num_layers(parallel)
        blocks = max_concurrent * -(-max_tokens // CPU_BLOCK_TOKENS) + 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(min(blocks * per_block, memory_fraction * memory))

    @property
    def release(self) -> str:
        return str(self._vllm.__version__)

    @property
    def model_name(self) -> str:
        return type(self._runner.get_model()).__name__

    def set_owner(self, owner: Owner) -> None:
        """From now on all responses in flight here are this engine's; the previous owner's are withdrawn."""
        other = self._owner() if self._owner is not None else None
        if other is not owner:
            if other is not None:
                other.withdraw()
            self.abort(sorted(self.in_flight))  # of an engine that is gone: an evaluation that was interrupted
        self._owner = weakref.ref(owner)

    def add(self, item: Response, sampling: SamplingParams, eos_ids: Sequence[int]) -> str:
        """Queue a response, its tokens so far as part of the prompt. Returns its request id inside vLLM."""
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=item.seed if sampling.temperature > 0 else None,
            max_tokens=item.request.max_new_tokens - len(item.tokens),
            stop_token_ids=[i for i in eos_ids if i < self._config.model_config.get_vocab_size()],
            ignore_eos=True,  # the end tokens are stop_token_ids
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self._n_sent += 1
        tag = f"{item.request.id}-{self._n_sent}"  # never used twice
        prompt = {"prompt_token_ids": [*item.request.prompt, *item.tokens]}
        self._engine.add_request(tag, prompt, params)
        self.in_flight.add(tag)
        return tag

    def step(self) -> list[NewTokens]:
        # On a CPU even eager mode compiles small functions on their first call. That takes half a minute, needs a C++
        # compiler and gains nothing.
        stance = torch.compiler.set_stance("force_eager") if self.device == "cpu" else nullcontext()
        with stance, torch.random.fork_rng(devices=[]):  # it draws from the process's generator before the seeded ones
            outputs = self._engine.step()
        new = []
        for output in outputs:
            part = output.outputs[0]
            logp = [entry[token].logprob for entry, token in zip(part.logprobs or (), part.token_ids, strict=True)]
            why = f"finish reason {part.finish_reason}"
            new.append(NewTokens(output.request_id, part.token_ids, logp, output.finished, why))
        self.in_flight -= {item.tag for item in new if item.is_finished}
        return new

    def abort(self, tags: Sequence[str]) -> None:
        if tags:
            self._engine.abort_request(list(tags))
            self.in_flight.difference_update(tags)

    def forget_prefixes(self) -> None:
        """Nothing may be in flight."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("rollout.engine = vllm: its prefix cache could not be emptied; old weights would show.")

    def clear_kv(self) -> None:
        self.forget_prefixes()
        for cache in self._runner.kv_caches:
            for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
                tensor.zero_()

    @torch.no_grad()
    def load(self, policy: Policy) -> None:
        """Copy the policy's weights into the running model, in place: captured graphs stay valid."""
        vllm = self._vllm
        reload = vllm.model_executor.model_loader.reload
        model = self._runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        with vllm.config.set_current_vllm_config(self._config):
            reload.initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(checkpoint_tensors(policy))
            finally:
                reload.finalize_layerwise_reload(model, self._config.model_config)
            self._repack_head(model)
        missing = sorted(wanted - loaded) if loaded is not None else []
        if missing:
            raise EngineError(
                f"rollout.engine = vllm: {len(missing)} weights of its {type(model).__name__} are not among those of "
                f"the policy: {', '.join(missing[:3])}.",
                remedy='Use rollout.engine="local" if it knows the architecture.',
            )

    def _repack_head(self, model: Any) -> None:
        """On a CPU vLLM uses a packed copy of the head, which a reload of tied embeddings does not update."""
        if self.device != "cpu":
            return
        for module in model.modules():
            if isinstance(module, self._vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = self._runner = None
            gc.collect()  # its objects refer to each other


def require_vllm() -> None:
    """Refuse at once, before a model is loaded, where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise _not_there("it is not installed")


def _not_there(why: str) -> EngineError:
    return EngineError(
        f"rollout.engine = vllm: the package vllm cannot be used here: {why}.",
        remedy='Install it with: pip install "dapo[vllm]" (docs/engines.md says which versions), or use engine local.',
    )


def import_vllm() -> Any:
    """The package with the submodules used here, in a process set up for it."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns on every reload, which is what we want it to do
    try:
        import vllm
        import vllm.config
        import vllm.model_executor.layers.vocab_parallel_embedding
        import vllm.model_executor.model_loader.reload
        import vllm.sampling_params
    except ImportError as error:
        raise _not_there(f"importing it fails with {error}") from error
    return vllm


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts; the trainer's must stay as they are."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


@contextmanager
def _memory_of_its_own() -> Iterator[None]:
    """While an engine starts on ranks of a CPU: a name for the memory they share that no other run uses.

    vLLM gives it the same name in all runs of an external launcher, and refuses to start where the name is taken: while
    another run lasts, or after one that ended without removing it. Here the name carries the port of this run, memory
    that a dead run left under it is removed, and once all ranks have joined, the name is unlinked: the memory lives as
    long as they do.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    make_name, start = Shared.make_group_name, Shared._init_cpu_shm

    def own_name(communicator: Any) -> str:
        return f"dapo-{os.environ.get('MASTER_PORT', '')}{make_name(communicator)}".replace("/", "")

    def own_start(shared: Any) -> Any:
        memory = Path("/dev/shm", f"{shared.group_name}_{shared.communicator.rank}")
        memory.unlink(missing_ok=True)
        try:
            return start(shared)  # returns when all ranks have joined
        finally:
            memory.unlink(missing_ok=True)

    Shared.make_group_name, Shared._init_cpu_shm = staticmethod(own_name), own_start
    try:
        yield
    finally:
        Shared.make_group_name, Shared._init_cpu_shm = staticmethod(make_name), start
