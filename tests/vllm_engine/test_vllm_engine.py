"""What only the vLLM engine has: weights of its own to keep up to date, one vLLM for two engines, a package to miss."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo.errors import EngineError
from dapo.models.load import checkpoint_tensors
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.policy import Policy, add_lora
from dapo.rollout.engine import SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.vllm.engine import VllmEngine
from dapo.rollout.vllm.response import Response
from engine_requests import by_id, drain, gap, request, same, shaken, small_policy
from tiny_models import SHAPE, VOCABULARY, tiny_tokenizer

MAX_TOKENS = 96
Make = Callable[..., VllmEngine]


@pytest.fixture
def engine() -> Iterator[Make]:
    opened: list[VllmEngine] = []

    def make(policy: Policy, *, rows: int = 8, max_tokens: int = MAX_TOKENS, share: float = 0.4, **sampling: float):
        params = SamplingParams(**sampling)
        opened.append(
            VllmEngine(policy, sampling=params, max_concurrent=rows, max_tokens=max_tokens, memory_fraction=share)
        )
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2-tied", "qwen3", "qwen3-tied", "mistral-window"])
def test_an_update_of_the_weights_reaches_vllm(engine: Make, family: str):
    """Prompts longer than a block of the KV cache, asked again after the update: no cached prefix of old weights."""
    policy = small_policy(family)
    ours = engine(policy, temperature=0.8)
    ours.submit([request(i, n_prompt=70) for i in range(6)])
    before = drain(ours)
    assert gap(policy, before, 0.8) < 1e-5

    shaken(policy)
    ours.submit([request(i, n_prompt=70) for i in range(6)])
    stale = drain(ours)
    assert gap(policy, stale, 0.8) > 0.1, "these weights are a copy: nothing may change before load_weights"
    assert all(same(a, b) for (_, a), (_, b) in zip(before, stale, strict=True))

    ours.load_weights(policy, version=1)
    ours.submit([request(i, n_prompt=70) for i in range(6)])
    after = drain(ours)
    assert gap(policy, after, 0.8) < 1e-5
    assert all(set(completion.version.tolist()) == {1} for _, completion in after)


def random_policy(model_class: type, config: PretrainedConfig) -> Policy:
    torch.manual_seed(0)
    return Policy(model_class._from_config(config, attn_implementation=PACKED_ATTENTION), tiny_tokenizer()).eval()


WIDE = {**SHAPE, "hidden_size": 128, "initializer_range": 0.1}
OTHERS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=128, n_layer=2, n_head=4, initializer_range=0.1, eos_token_id=2
    )),
    "phi3": (Phi3ForCausalLM, Phi3Config(**WIDE)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_architectures_that_the_local_engine_does_not_know(engine: Make, name: str):
    policy = random_policy(*OTHERS[name])
    with pytest.raises(EngineError, match="it knows"):
        LocalEngine(policy, sampling=SamplingParams(), max_concurrent=2, max_tokens=MAX_TOKENS)
    ours = engine(policy, temperature=0.8)
    for version in (0, 1):
        ours.submit([request(i, n_prompt=40) for i in range(6)])
        assert gap(policy, drain(ours), 0.8) < 1e-5
        ours.load_weights(shaken(policy), version + 1)


def test_a_model_whose_weights_vllm_does_not_take_over_is_refused(engine: Make):
    """vLLM 0.32 on a CPU packs experts when it loads a model, and not again when their weights change."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    policy = random_policy(Qwen3MoeForCausalLM, Qwen3MoeConfig(**WIDE, head_dim=32, **experts))
    with pytest.raises(EngineError, match=r"Qwen3MoeForCausalLM gives log-probs that differ .*cannot take over"):
        engine(policy)


def test_a_model_that_vllm_would_borrow_from_hugging_face_is_refused(engine: Make):
    policy = random_policy(Olmo2ForCausalLM, Olmo2Config(**WIDE))
    with pytest.raises(EngineError, match=r"has no Olmo2ForCausalLM of its own"):
        engine(policy)
    policy.model(torch.tensor([[3, 4]]))  # still runs


def test_an_adapter_is_part_of_the_weights(engine: Make):
    policy = add_lora(small_policy("qwen2-tied"), rank=2, alpha=4.0)
    ours = engine(policy)
    for version in (0, 1):
        ours.submit([request(i) for i in range(4)])
        assert gap(policy, drain(ours)) < 1e-5
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        ours.load_weights(policy, version + 1)
    names = [name for name, _ in checkpoint_tensors(policy)]
    assert names == [name for name, _ in small_policy("qwen2-tied").base.named_parameters()]


def test_a_weight_that_has_no_counterpart_is_an_error(engine: Make):
    ours = engine(small_policy("llama"))
    with pytest.raises(
        EngineError, match=r"1 weights of its LlamaForCausalLM are not among those of the policy: .*lm_head"
    ):
        ours.load_weights(small_policy("llama-tied"), 1)


def test_two_engines_on_one_vllm_take_turns(engine: Make):
    """An evaluation in the middle of a step: its own sampling, and what was in flight goes on afterwards."""
    policy = small_policy()
    training = engine(policy, rows=4)
    training.submit([request(i) for i in range(6)])
    finished = [item for _ in range(3) for item in training.advance()]
    examining = training.fork_for_eval(SamplingParams(temperature=0.0))
    examining.submit([request(i) for i in range(5)])
    greedy = drain(examining)
    assert training.tick == 3
    assert training.n_in_flight == 4 - len(finished)
    finished += drain(training)
    assert sorted(by_id(finished)) == list(range(6))
    assert gap(policy, finished) < 1e-5
    assert gap(policy, greedy) < 1e-5
    training.submit([request(i) for i in range(5)])
    assert not any(same(a, b) for (_, a), (_, b) in zip(greedy, drain(training), strict=True))


def test_out_of_kv_memory_some_wait_and_all_end(engine: Make):
    """Room for a third of what is asked for: vLLM preempts, and what comes back is still what the model says."""
    policy = small_policy()
    # 24 responses need 24 x 3 blocks of 32 tokens, at 2 layers x 2 x 2 heads x 32 x 4 bytes a token.
    n_bytes = 24 * 32 * 2 * 2 * 2 * 32 * 4
    wanted = engine(policy, rows=24, share=n_bytes / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    wanted.submit([request(i, max_new_tokens=50, n_prompt=40) for i in range(24)])
    finished = drain(wanted)
    assert sorted(by_id(finished)) == list(range(24))
    assert wanted.tick > 50
    assert gap(policy, finished) < 1e-5


def test_a_response_sent_again_does_not_repeat_its_noise():
    item = Response(request(3), 0)
    seeds = set()
    for n in range(50):
        item.tokens = [5] * n
        seeds.add(item.seed & 0xFFFFFFFF)  # torch's CPU generator looks at no more
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert Response(request(3), 7).seed == Response(request(3), 0).seed != Response(request(4), 0).seed


def test_starting_vllm_does_not_touch_the_trainers_random_numbers(engine: Make):
    policy = small_policy()
    drawn = []
    for is_used in (False, True):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        if is_used:
            ours = engine(policy)
            ours.submit([request(i) for i in range(3)])
            drain(ours)
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_what_vllm_cannot_do_is_refused_by_name(engine: Make):
    with pytest.raises(EngineError, match=r"model\.dtype = float64"):
        engine(small_policy(dtype=torch.float64))
    with pytest.raises(EngineError, match=r"max_response_tokens = 300: the model has 256 positions"):
        engine(small_policy(), max_tokens=300)


def test_nothing_is_pickled_and_nothing_listens_but_on_this_machine(engine: Make):
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
    ours = engine(small_policy())
    settings = ours.core._config
    assert settings.load_config.load_format == "dummy"
    assert not settings.model_config.trust_remote_code
    assert type(ours.core._engine.engine_core).__name__ == "InprocClient"
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{os.getpid()}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in own_sockets():
                assert local.split(":")[0] in ("0100007F", "0" * 24 + "01000000"), f"listens on {local}"


def own_sockets() -> set[str]:
    """Inodes of the sockets of this process."""
    folder = f"/proc/{os.getpid()}/fd"
    links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")]
    return {link[8:-1] for link in links if link.startswith("socket:[")}
