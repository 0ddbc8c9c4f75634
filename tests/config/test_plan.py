"""Derived numbers and the memory estimate."""

import json
from pathlib import Path

import pytest
import torch

from dapo.config import load_recipe
from dapo.config.advice import warnings_of
from dapo.config.machine import GIB
from dapo.config.model_shapes import KNOWN, shape_of
from dapo.learner.optimizer import Optimizer
from dapo.models import logprobs
from dapo.planning.plan import HEAD_LOGITS, NOT_HELD, memory_of, micro_batch_tokens, parts_of, work_of

ROOT = Path(__file__).parents[2]

SEVEN = "Qwen/Qwen2.5-7B-Instruct"


def test_the_published_run_in_plain_numbers():
    work = work_of(load_recipe("dapo-qwen2.5-32b").config)
    assert work.responses_per_step == 512 * 16
    assert work.updates_per_step == 16
    assert work.prompts_per_update == 512 / 16
    assert work.max_response_tokens_per_step == 512 * 16 * 20480


def test_epochs_multiply_updates():
    config = load_recipe("quickstart", ["preset=vanilla-ppo"]).config
    assert work_of(config).updates_per_step == config.train.updates_per_step * 4


@pytest.mark.parametrize(
    ("model", "billions"),  # as published on the models' pages
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.49),
        ("Qwen/Qwen2.5-Math-1.5B", 1.54),
        ("Qwen/Qwen2.5-3B", 3.09),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 7.61),
        ("Qwen/Qwen2.5-14B", 14.7),
        ("Qwen/Qwen2.5-32B", 32.5),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.135),
        ("HuggingFaceTB/SmolLM2-360M", 0.362),
        ("HuggingFaceTB/SmolLM2-1.7B", 1.71),
    ],
)
def test_parameters_from_the_shape_match_the_published_size(model: str, billions: float):
    shape = shape_of(model)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_model_folder_brings_its_own_shape(tmp_path: Path):
    shape = KNOWN["huggingfacetb/smollm2-135m"]
    config = {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == shape
    assert shape_of("somebody/unknown-model") is None


def test_memory_by_hand_for_full_training_in_bf16():
    config = load_recipe("math-1.5b-80gb").config
    shape = shape_of(config.model.path)
    assert shape is not None
    memory = memory_of(config, shape, is_cuda=True, gpus=1)
    assert memory.parts["weights"] == 2 * shape.parameters
    assert memory.parts["gradients and optimizer"] == (4 + 4 + 8) * shape.parameters  # gradient, master, two moments
    assert memory.kv_bytes_per_token == 2 * 28 * 2 * 128 * 2  # k and v, layers, kv heads, head size, bytes
    assert memory.full_length_responses(80, 4096) > 100
    assert memory.full_length_responses(memory.fixed / GIB, 4096) == 0


def test_lora_trains_a_sliver_and_sharding_divides():
    config = load_recipe("gsm8k-0.5b-lora-8gb").config
    shape = shape_of(config.model.path)
    assert shape is not None
    memory = memory_of(config, shape, is_cuda=True, gpus=1)
    assert memory.parts["gradients and optimizer"] < 0.1 * 16 * shape.parameters
    assert memory.fixed < 8 * GIB
    assert shape.lora_parameters(8, ("q_proj", "down_proj")) == 24 * 8 * ((896 + 896) + (4864 + 896))
    eight = load_recipe("dapo-math-7b-8x80gb").config
    shape = shape_of(eight.model.path)
    assert shape is not None
    one, many = (memory_of(eight, shape, is_cuda=True, gpus=n) for n in (1, 8))
    assert many.parts["gradients and optimizer"] == one.parts["gradients and optimizer"] // 8
    assert many.parts["engine's gathered weights"] == 2 * shape.parameters


def test_an_adapter_keeps_what_matrices_read_in_float32_and_no_gradient_of_the_head():
    shape = KNOWN["qwen/qwen2.5-1.5b"]
    keys = ["train.gradient_checkpointing=true", "train.tokens_per_microbatch=10000", "model.dtype=bfloat16"]
    keys += ["rollout.max_concurrent_sequences=100", "rollout.engine=local"]
    lora, whole, two = (
        memory_of(load_recipe("gsm8k-1.5b-24gb", [*keys, *more]).config, shape, is_cuda=True, gpus=gpus).parts
        for more, gpus in (
            ((), 1),
            (("model.lora.rank=0",), 1),
            (("preset=grpo", "cluster.backend=torchrun", "cluster.gpus=2"), 2),
        )
    )
    read = 3 * 1536 + 1536 + 2 * 1536 + 8960  # by q, k, v; o; gate, up; down
    assert lora["activations"] - whole["activations"] == 10_000 * 4 * read
    assert whole["output head"] - lora["output head"] == 4 * 151_936 * 1536
    assert lora["engine's logits"] == 2 * 100 * 151_936 * 4  # in graphs, and of the step before they were captured
    assert two["engine's logits"] == lora["engine's logits"] // 2
    assert two["reference model"] == 2 * shape.parameters // 2  # sharded ranks cannot take an adapter off


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.5), ("nf4", 4.5)])
def test_a_quantized_base_has_half_a_bit_of_scales_and_is_the_reference_itself(kind: str, bits: float):
    """Of the matrices inside the layers; embeddings, norms and biases stay in 16 bits."""
    shape = KNOWN["qwen/qwen2.5-7b"]
    quantized = [f"model.lora.quantization={kind}", f"model.path={SEVEN}", "preset=grpo"]
    one, lora = (
        memory_of(load_recipe("gsm8k-1.5b-24gb", keys).config, shape, is_cuda=True, gpus=1)
        for keys in (quantized, quantized[1:])
    )
    matrices = shape.linear_parameters
    assert lora.parts["weights"] - one.parts["weights"] == matrices * 2 - matrices * bits / 8
    assert one.parts["dequantized matrices"] == 2 * 2 * 3584 * 18944
    assert "reference model" not in one.parts.keys() | lora.parts.keys()
    teacher = load_recipe("gsm8k-1.5b-24gb", [*quantized, f"algorithm.kl.path={SEVEN}"]).config
    assert memory_of(teacher, shape, is_cuda=True, gpus=1).parts["reference model"] == 2 * shape.parameters
    ranks = load_recipe("gsm8k-1.5b-24gb", [*quantized, "cluster.backend=torchrun", "cluster.gpus=2"]).config
    assert memory_of(ranks, shape, is_cuda=True, gpus=2).parts == one.parts  # nothing is sharded


@pytest.mark.parametrize(("recipe", "gib"), [("gsm8k-1.5b-qlora-8gb", 8), ("math-7b-qlora-24gb", 24)])
def test_recipes_of_qlora_fit_their_card(recipe: str, gib: int):
    config = load_recipe(recipe).config
    shape = shape_of(config.model.path)
    assert shape is not None
    limit = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    memory = memory_of(config, shape, is_cuda=True, gpus=1)
    assert memory.full_length_responses(gib, limit) >= config.rollout.max_concurrent_sequences


def test_a_critic_and_a_reference_are_counted():
    shape = KNOWN["qwen/qwen2.5-1.5b"]
    grpo, ppo, dapo = (
        memory_of(load_recipe("math-1.5b-80gb", [f"preset={p}"]).config, shape, is_cuda=True, gpus=1)
        for p in ("grpo", "ppo", "dapo")
    )
    assert grpo.parts["reference model"] == 2 * shape.parameters
    assert ppo.parts["weights"] == 2 * dapo.parts["weights"]
    assert "reference model" not in dapo.parts


@pytest.mark.parametrize("preset", ["ppo", "grpo"])
def test_the_estimate_is_the_peak_that_was_measured_of_an_update(preset: str):
    """Of tensors, by torch's count, on an H200: neither an engine nor CUDA's own memory is in it."""
    measured = json.loads((ROOT / "docs/results/bench-presets-h200.json").read_text())["presets"][preset]["peak_gib"]
    config = load_recipe("gsm8k-coder-1.5b-h200", [f"preset={preset}"]).config  # 1.5 B, 16,384 tokens as measured
    parts = memory_of(config, KNOWN["qwen/qwen2.5-1.5b"], is_cuda=True, gpus=1).parts
    others = ("engine's logits", "allocator's unused blocks", "CUDA itself")
    of_update = sum(size for name, size in parts.items() if name not in others) / GIB
    assert of_update == pytest.approx(measured, rel=0.01)


def test_a_chunk_of_logits_is_as_large_as_the_head_makes_it():
    assert HEAD_LOGITS == {True: logprobs.CUDA_CHUNK_ELEMENTS, False: logprobs.CHUNK_ELEMENTS}


def test_gradients_of_a_critic_are_gone_before_those_of_the_policy_come():
    """What the estimate counts once: an optimizer drops its gradients with its step, and keeps masters and moments."""
    weights = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    settings = {"betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": 1.0}
    optimizer = Optimizer([("w", weights)], **settings)
    weights.sum().backward()
    master = optimizer.masters["w"]
    assert (weights.grad, master.grad.nbytes) == (None, 4 * 1000)
    optimizer.step(1e-3)
    assert master.grad is None
    held = [master.data, *(tensor for tensor in optimizer.moments.tensors().values() if tensor.dim())]
    assert sum(tensor.nbytes for tensor in held) == (4 + 8) * 1000


def test_parts_say_what_is_off_too():
    parts = dict(parts_of(load_recipe("quickstart", ["preset=grpo-naive"]).config))
    assert parts["dynamic sampling"] == parts["overlong filtering"] == parts["critic"] == "off"
    assert "symmetric" in parts["clip"]
    assert "not the paper" in dict(parts_of(load_recipe("quickstart", ["preset=dapo-fast"]).config))["carry-over"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["preset=vanilla-ppo"], "λ 0.95 (effective horizon: about 20 tokens)"),
        (["preset=ppo"], "λ 1 (effective horizon: the whole response)"),
        (["preset=ppo", "algorithm.gae.gamma=0.9"], "(effective horizon: about 10 tokens)"),
        (
            ["preset=vapo", "limits.max_response_tokens=20480"],
            "λ = 1 − 1/max(0.05·length, 400) (effective horizon: about 1,024 tokens of a response of 20,480)",
        ),
        (["preset=vapo"], "about 400 tokens of a response of 64"),
        (
            ["preset=vapo", "algorithm.gae.length_adaptive_floor=1"],
            "1/(0.05·length) (effective horizon: about 3 tokens",
        ),
    ],
)
def test_a_plan_says_how_far_a_reward_reaches(keys: list[str], said: str):
    assert said in dict(parts_of(load_recipe("quickstart", keys).config))["advantage"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["preset=vanilla-ppo"], "about the last 20 tokens of up to 1,024"),
        (["preset=vanilla-ppo"], "Try algorithm.gae.lam = 1.0."),
        (["preset=ppo", "algorithm.gae.gamma=0.99"], "Try algorithm.gae.gamma = 1.0 (now 0.99)."),
        (["preset=vapo", "algorithm.gae.length_adaptive_floor=1"], "Try algorithm.gae.length_adaptive_floor = 400."),
    ],
)
def test_a_horizon_that_is_short_beside_the_responses_is_warned_of(keys: list[str], said: str):
    [warning] = warnings_of(load_recipe("gsm8k-coder-1.5b-h200", keys).config)
    assert said in warning


def test_a_floor_that_is_long_enough_is_not_advised():
    keys = ["preset=vapo", "algorithm.gae.gamma=0.99"]
    [warning] = warnings_of(load_recipe("gsm8k-coder-1.5b-h200", keys).config)
    assert "floor" not in warning
    assert "gamma = 1.0" in warning


def test_no_warning_where_a_reward_reaches_enough():
    for keys in (["preset=ppo"], ["preset=vapo"], ["preset=dapo"], ["preset=ppo", "algorithm.gae.lam=0.9976"]):
        assert warnings_of(load_recipe("gsm8k-coder-1.5b-h200", keys).config) == []
    paper = ["preset=vapo", "algorithm.gae.length_adaptive_floor=1"]  # 1,024 of 20,480: known to work
    assert warnings_of(load_recipe("dapo-qwen2.5-32b", [*paper, "sampling.dynamic=false"]).config) == []
    assert warnings_of(load_recipe("quickstart", ["preset=vanilla-ppo"]).config) == []  # 20 of 64


def test_a_teacher_is_in_the_plan_with_its_own_size():
    config = load_recipe("gsm8k-coder-1.5b-h200", ["preset=distillation", "algorithm.kl.path=Qwen/Qwen2.5-7B"]).config
    shape = shape_of(config.model.path)
    assert shape is not None
    parts = memory_of(config, shape, is_cuda=True, gpus=1).parts
    assert parts["reference model"] == 2 * KNOWN["qwen/qwen2.5-7b"].parameters  # bfloat16
    said = dict(parts_of(config))
    assert said["advantage"] == "none: distillation"
    assert said["KL to a reference"] == (
        "1 x k1 in every token's advantage: on-policy distillation, from Qwen/Qwen2.5-7B"
    )


CAPPED = json.loads((ROOT / "docs/results/capped-recipes.json").read_text())["trials"]
LENGTHS = {  # of a trial whose stand-ins are shorter than the recipe's limits, and whose updates one micro-batch holds
    "arithmetic-smollm2-135m": ("limits.max_prompt_tokens=32", "limits.max_response_tokens=24"),
}


@pytest.mark.parametrize("name", [name for name, trial in CAPPED.items() if trial["ran"] and trial["peak_gib"]])
def test_the_estimate_is_within_a_tenth_of_the_cards_own_count(name: str):
    trial = CAPPED[name]
    config = load_recipe(trial["recipe"], [*trial["settings"], *LENGTHS.get(name, ())]).config
    memory = memory_of(config, shape_of(config.model.path), is_cuda=True, gpus=config.cluster.gpus)
    estimate = memory.fixed / GIB + trial["estimate_gib"]["kv_cache"]
    assert estimate == pytest.approx(trial["peak_gib"], rel=0.1)
    assert estimate == pytest.approx(trial.get("estimate_at_its_lengths_gib", estimate), abs=0.01)


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ([], 16 * (200 + 16 * 48)),  # 16 prompts an update, once each, with 16 responses
        (["train.tokens_per_microbatch=4096"], 4096),
        (["train.tokens_per_microbatch=256", "limits.max_prompt_tokens=500"], 548),  # one row
        (["train.updates_per_step=3"], 22 * (200 + 16 * 48)),
        (["preset=ppo", "train.tokens_per_microbatch=100000"], 16 * 16 * 248),  # pretraining asks each problem once
        (["preset=ppo", "algorithm.critic.pretrain_responses=0"], 16 * (200 + 16 * 48)),
    ],
)
def test_a_micro_batch_is_no_larger_than_an_update(keys: list[str], tokens: int):
    assert micro_batch_tokens(load_recipe("arithmetic-smollm2-135m", keys).config) == tokens


def test_what_a_run_holds_all_the_time_is_weights_and_what_trains_them():
    """By this `cluster.shard = "auto"` decides (learner.is_sharded)."""
    config = load_recipe("gsm8k-1.5b-qlora-8gb").config
    parts = memory_of(config, KNOWN["qwen/qwen2.5-1.5b"], is_cuda=True, gpus=1).parts
    assert set(parts) - set(NOT_HELD) == {"weights", "gradients and optimizer"}
    assert set(NOT_HELD) <= set(parts)
