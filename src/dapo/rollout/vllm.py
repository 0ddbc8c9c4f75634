"""The vLLM engine: the streaming protocol on a vLLM that runs in this process, step by step, with its own weights.

Everything that touches vLLM is in this file, and what differs between the releases it is tested with (0.24 on CUDA,
0.32 on CPU) is in `VllmCore`. No server, no second process, nothing pickled: weights are handed over as tensors.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import random
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dapo.errors import EngineError
from dapo.models.load import checkpoint_tensors, save_shape
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, Fault, Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.written import Written, check_request, completions, from_state, to_state
from dapo.types import StopReason

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
# Mean distance of vLLM's log-probs from the policy's own, above which the weights did not arrive as they should.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
SEED_BITS = 63


@dataclass(slots=True)
class Response:
    """A request and what was written for it so far. `tag` is its name inside vLLM, while it is there."""

    request: Request
    order: int  # of submission
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    tag: str | None = None

    @classmethod
    def of(cls, item: Written) -> Response:
        return cls(item.request, item.order, item.tokens.tolist(), item.logp.tolist(), item.version.tolist())

    def written(self) -> Written:
        tokens, version = np.array(self.tokens, np.int32), np.array(self.version, np.int32)
        return Written(self.request, self.order, tokens, np.array(self.logp, np.float32), version)

    @property
    def seed(self) -> int:
        """Of vLLM's noise from here on: a function of the key and of how much is written.

        A response that is sent again half-written must not see the noise of its beginning twice.
        """
        a, b, _, _ = self.request.key.words()
        return ((a | b << 32) ^ (len(self.tokens) * GOLDEN_GAMMA)) & ((1 << SEED_BITS) - 1)


class VllmEngine:
    """Writes responses with vLLM on a copy of the policy's weights. Implements `Engine`, but for what vLLM cannot.

    The noise is vLLM's own, seeded per response from its `NoiseKey`: the same requests, submitted in the same order,
    give the same responses, but a response may change in its last bits, and then in its tokens, with what else is in
    the batch. A tick is one step of vLLM: prompts that do not fit into one step begin later, and a response that vLLM
    preempts for want of memory writes nothing in that tick. Under top-p or top-k the log-probs are those of the cut,
    renormalised distribution; training refuses both.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: SamplingParams,
        max_concurrent: int,
        max_tokens: int,
        version: int = 0,
        memory_share: float = 0.4,
        tensor_parallel: int = 1,
        core: VllmCore | None = None,
    ) -> None:
        if core is None:
            core = VllmCore(
                policy,
                max_concurrent=max_concurrent,
                max_tokens=max_tokens,
                memory_share=memory_share,
                tensor_parallel=tensor_parallel,
            )
            try:
                core.load(policy)
                core.check_weights(policy, max_tokens)
            except BaseException:  # whatever stopped it: leave no vLLM behind
                core.close()
                raise
        self.core = core
        self.policy = policy
        self.sampling = sampling
        self.max_concurrent = max_concurrent
        self.max_tokens = max_tokens
        self.logp_dtype = np.float32
        self.version = version
        self.tick = 0
        self.faults: list[Fault] = []
        self._waiting: deque[Response] = deque()
        self._running: dict[int, Response] = {}  # by request id, in order of submission
        self._n_submitted = 0
        self._is_paused = False

    def beside(self, sampling: SamplingParams) -> VllmEngine:
        """Another engine on the same vLLM, with sampling parameters of its own: an evaluation amid training.

        The two take turns. Whoever ticks has the machine; what the other has in flight waits, and is gone on with.
        """
        sizes = {"max_concurrent": self.max_concurrent, "max_tokens": self.max_tokens}
        return VllmEngine(self.policy, sampling=sampling, version=self.version, core=self.core, **sizes)

    @property
    def n_in_flight(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def capacity(self) -> int:
        return max(0, self.max_concurrent - self.n_in_flight - self.n_waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        seen = {item.request.id for item in (*self._running.values(), *self._waiting)}
        for request in requests:
            check_request(request, seen, self.max_tokens)
            seen.add(request.id)
        for request in requests:
            self._waiting.append(Response(request, self._n_submitted))
            self._n_submitted += 1

    def take_over(self, items: Sequence[Written]) -> None:
        """Queue what another engine may have begun, with its own place in the order of submission."""
        seen = {item.request.id for item in (*self._running.values(), *self._waiting)}
        for item in items:
            check_request(item.request, seen, self.max_tokens)
            seen.add(item.request.id)
        self._waiting.extend(Response.of(item) for item in items)

    def advance(self) -> list[Finished]:
        if self._is_paused:
            return []
        self.tick += 1
        while self._waiting and len(self._running) < self.max_concurrent:
            item = self._waiting.popleft()
            self._running[item.request.id] = item
        if not self._running:
            return []
        self._take_core()
        self._send()
        ended: dict[int, StopReason] = {}
        by_tag = {item.tag: item for item in self._running.values()}
        for new in self.core.step():
            item = by_tag[new.tag]
            reason = self._write(item, new)
            if reason is not None:
                ended[item.request.id] = reason
        if StopReason.ABORTED in ended.values():
            # What is not finite lies in the KV cache now, and nought times it is not nought.
            self._withdraw()
            self.core.clear_kv()
        return self._finish(ended)

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        wanted = set(ids)
        dropped = [item for item in self._waiting if item.request.id in wanted]
        if dropped:
            self._waiting = deque(item for item in self._waiting if item.request.id not in wanted)
        running = [i for i in self._running if i in wanted]
        self.core.abort([tag for i in running if (tag := self._running[i].tag)])
        finished = self._finish(dict.fromkeys(running, StopReason.ABORTED))
        return finished + self._completions(dropped, [StopReason.ABORTED] * len(dropped))

    def load_weights(self, policy: Policy, version: int) -> None:
        """Copy the policy's tensors into vLLM's model. What is in flight is sent again, so that its KV is new too."""
        self._take_core()
        self._void_kv()
        self.core.load(policy)
        self.policy = policy
        self.version = version

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def close(self) -> None:
        """Give back vLLM's memory. Neither this engine nor one beside it can be used afterwards."""
        self.core.close()

    def snapshot(self) -> EngineState:
        """Void the KV here too, so that going on and being restored are the same computation."""
        self._take_core()
        self._void_kv()
        meta = {
            "tick": self.tick,
            "version": self.version,
            "n_submitted": self._n_submitted,
            "n_running": len(self._running),
            "is_paused": self._is_paused,
        }
        items = [*self._running.values(), *self._waiting]
        return to_state([item.written() for item in items], np.float32, meta)

    def restore(self, state: EngineState) -> None:
        meta = state.meta
        if meta["n_running"] > self.max_concurrent:
            raise EngineError(
                f"rollout.max_concurrent_responses = {self.max_concurrent}: the snapshot has {meta['n_running']} "
                "responses in flight.",
                remedy="Resume with at least as many.",
            )
        items = [Response.of(item) for item in from_state(state)]
        seen: set[int] = set()
        for item in items:
            check_request(item.request, seen, self.max_tokens)
            seen.add(item.request.id)
        self._take_core()
        self._void_kv()
        n = meta["n_running"]
        self._running = {item.request.id: item for item in items[:n]}
        self._waiting = deque(items[n:])
        self.tick, self.version, self._n_submitted = meta["tick"], meta["version"], meta["n_submitted"]
        self._is_paused = meta["is_paused"]

    def _take_core(self) -> None:
        """Have the machine to ourselves."""
        other = self.core.owner
        if other is not self:
            if other is not None:
                other._withdraw()
            self.core.abort(
                sorted(self.core.in_flight)
            )  # of an engine that is gone: an evaluation that was interrupted
        self.core.owner = self

    def _withdraw(self) -> None:
        """Take everything in flight out of vLLM; the next tick sends it again, with what is written as its prompt."""
        self.core.abort([item.tag for item in self._running.values() if item.tag])
        for item in self._running.values():
            item.tag = None

    def _void_kv(self) -> None:
        self._withdraw()
        self.core.forget_prefixes()

    def _send(self) -> None:
        for item in self._running.values():
            if item.tag is None:
                item.tag = self.core.add(item, self.sampling, self.policy.eos_ids)

    def _write(self, item: Response, new: NewTokens) -> StopReason | None:
        """Add what a step wrote; say why the response ended, if it did."""
        for token, logp in zip(new.tokens, new.logp, strict=True):
            if not math.isfinite(logp):
                self._fault(item, "logits are not finite")
                return StopReason.ABORTED
            item.tokens.append(token)
            item.logp.append(logp)
            item.version.append(self.version)
        if not new.is_finished:
            return None
        item.tag = None
        if item.tokens and item.tokens[-1] in self.policy.eos_ids:
            return StopReason.EOS
        if len(item.tokens) >= item.request.max_new_tokens:
            return StopReason.LENGTH
        self._fault(item, f"vLLM gave it up ({new.why})")
        return StopReason.ABORTED

    def _fault(self, item: Response, reason: str) -> None:
        self.faults.append(Fault(self.tick, item.request, len(item.tokens), reason))

    def _finish(self, reasons: dict[int, StopReason]) -> list[Finished]:
        """Completions in order of submission."""
        items = sorted((self._running.pop(i) for i in reasons), key=lambda item: item.order)
        return self._completions(items, [reasons[item.request.id] for item in items])

    def _completions(self, items: Sequence[Response], reasons: Sequence[StopReason]) -> list[Finished]:
        return completions([item.written() for item in items], reasons, self.policy.tokenizer)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one step wrote for one response."""

    tag: str
    tokens: Sequence[int]
    logp: Sequence[float]
    is_finished: bool
    why: str


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
        memory_share: float,
        tensor_parallel: int = 1,
    ) -> None:
        vllm = import_vllm()
        self._vllm = vllm
        self._n_sent = 0
        self._owner: weakref.ref[VllmEngine] | None = None
        self.in_flight: set[str] = set()  # tags of all responses inside vLLM
        self.device = policy.device.type
        with tempfile.TemporaryDirectory(prefix="dapo-vllm-") as folder, _random_state_kept():
            # vLLM reads a model's shape from a folder; the weights come from the policy itself.
            save_shape(policy, folder)
            try:
                config = self._configuration(folder, policy, max_concurrent, max_tokens, memory_share, tensor_parallel)
                self._engine: Any = vllm.LLMEngine.from_vllm_config(config, disable_log_stats=True)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise EngineError(
                    f"rollout.engine = vllm: vLLM {vllm.__version__} does not start with this model: {error}",
                    remedy="Change what it names (limits, rollout.vllm.gpu_memory_share), or set rollout.engine=local.",
                ) from error
        self._config = config
        self._runner: Any = self._engine.model_executor.driver_worker.model_runner

    def _configuration(
        self,
        folder: str,
        policy: Policy,
        max_concurrent: int,
        max_tokens: int,
        memory_share: float,
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
            "gpu_memory_utilization": memory_share,
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
            config.cache_config.kv_cache_memory_bytes = self._kv_bytes(config, max_concurrent, max_tokens, memory_share)
        return config

    def _kv_bytes(self, config: Any, max_concurrent: int, max_tokens: int, memory_share: float) -> int:
        """For every response at its limit, and a block more; at most the share of main memory."""
        model, parallel = config.model_config, config.parallel_config
        width = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
        per_block = CPU_BLOCK_TOKENS * width * model.get_num_layers(parallel)
        blocks = max_concurrent * -(-max_tokens // CPU_BLOCK_TOKENS) + 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(min(blocks * per_block, memory_share * memory))

    @property
    def owner(self) -> VllmEngine | None:
        """The engine whose responses are in flight here."""
        return self._owner() if self._owner is not None else None

    @owner.setter
    def owner(self, engine: VllmEngine) -> None:
        self._owner = weakref.ref(engine)

    def add(self, item: Response, sampling: SamplingParams, eos_ids: Sequence[int]) -> str:
        """Queue a response, what is written so far as part of its prompt. Returns the name it goes by here."""
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=item.seed if sampling.temperature > 0 else None,
            max_tokens=item.request.max_new_tokens - len(item.tokens),
            stop_token_ids=[i for i in eos_ids if i < self._config.model_config.get_vocab_size()],
            ignore_eos=True,  # what ends a response is said above
            logprobs=0,  # of the drawn token only
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
        # On a CPU even the eager mode compiles small functions when they are first called: half a minute, and a C++
        # compiler, for nothing.
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
                f"rollout.engine = vllm: {len(missing)} weights of its {type(model).__name__} have no counterpart in "
                f"the policy: {', '.join(missing[:3])}.",
                remedy='Use rollout.engine="local" if it knows the architecture.',
            )

    def check_weights(self, policy: Policy, max_tokens: int) -> None:
        """Let vLLM write a few tokens and compare log-probs; refuse a model whose weights it does not take over.

        Catches what no list of architectures would: its reload leaves packed copies of some layers as they were.
        """
        vocabulary = policy.config.get_text_config().vocab_size
        prompt = tuple((7 * i + 3) % vocabulary for i in range(min(5, max_tokens - 1)))
        key = NoiseKey(0, "eval", "check", 0, 0)
        item = Response(Request(-1, prompt, key, min(8, max_tokens - len(prompt)), 0), 0)
        self.add(item, SamplingParams(), ())
        is_finished = False
        while not is_finished:
            for new in self.step():
                item.tokens += new.tokens
                item.logp += new.logp
                is_finished = new.is_finished
        self.forget_prefixes()
        with torch.no_grad():
            packed = pack([prompt], [np.array(item.tokens)], policy.device)
            expected = policy(packed, temperature=1.0, with_entropy=False)[0].float().cpu().numpy()
        known = np.isfinite(expected)
        gap = np.abs(np.array(item.logp, np.float32) - expected)[known].mean() if known.any() else 0.0
        if not gap <= TOLERANCE[policy.dtype]:
            raise EngineError(
                f"rollout.engine = vllm: with this policy's weights, vLLM's {type(self._runner.get_model()).__name__} "
                f"gives log-probs that differ from the policy's own by {gap:.2g} on average; vLLM "
                f"{self._vllm.__version__} on {self.device} cannot take over weights of this architecture.",
                remedy="Use engine local if it knows the architecture, or another version of vLLM.",
            )

    def _repack_head(self, model: Any) -> None:
        """On a CPU vLLM multiplies by a packed copy of the head, which a reload of tied embeddings leaves as it was."""
        if self.device != "cpu":
            return
        for module in model.modules():
            if isinstance(module, self._vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = self._runner = None
            gc.collect()  # what is left of it refers to itself


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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings on every reload say what is meant to be so
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
    """vLLM seeds every generator of the process when it starts; the trainer's must not notice."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


if TYPE_CHECKING:
    _implements: type[Engine] = VllmEngine
