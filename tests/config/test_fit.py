"""`--fit`: every recipe on every size of card fits by the estimate, or is refused with the card that it needs."""

from pathlib import Path

import pytest

from command_line import dapo
from dapo.config import load_recipe
from dapo.config.load import recipe_names
from dapo.config.machine import GIB
from dapo.config.model_shapes import ModelShape, shape_of
from dapo.config.schema import Config
from dapo.errors import ConfigError
from dapo.planning.fit import COMFORTABLE, FREE, Fit, card_gib, fit, refuse
from dapo.planning.plan import concurrency_of, memory_of

CARDS = (8, 16, 24, 48, 80)


def plan(recipe: str, *sets: str) -> tuple[Config, ModelShape]:
    config = load_recipe(recipe, list(sets)).config
    shape = shape_of(config.model.path)
    assert shape is not None
    return config, shape


def keys(found: Fit) -> dict[str, object]:
    return {one.key: one.value for one in found.choices}


@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_fits_a_card_by_the_estimate_or_is_refused_with_the_remedy(recipe: str, gib: int):
    config, shape = plan(recipe)
    found = fit(config, shape, gib)
    if not found.is_possible:
        with pytest.raises(ConfigError, match=f"--fit {gib}gb: {recipe} does not fit") as refused:
            refuse(found, recipe, f"{gib}gb", gib, shape, ())
        assert "limits.max_response_tokens" in refused.value.remedy
        assert "cluster.gpus" in refused.value.remedy or "GB or more" in refused.value.remedy
        return
    chosen = load_recipe(recipe, [one.override for one in found.choices]).config  # what a run would get, checked
    assert chosen == found.config
    memory = memory_of(chosen, shape, is_cuda=True, gpus=chosen.cluster.gpus)
    kv = (chosen.rollout.kv_cache_gib or 0) * GIB
    if chosen.rollout.engine == "vllm":
        kv = chosen.rollout.vllm.gpu_memory_utilization * gib * GIB - memory.parts["engine's own weights"]
    limit = chosen.limits.max_prompt_tokens + chosen.limits.max_response_tokens
    assert kv >= memory.kv_bytes_per_token * limit  # a response of full length
    assert memory.fixed + kv <= (1 - FREE) * gib * GIB


def test_what_fits_is_left_as_it_is_but_for_the_kv_cache():
    assert list(keys(fit(*plan("gsm8k-coder-1.5b-h200"), device_gib=139))) == ["rollout.kv_cache_gib"]


def test_the_smaller_the_card_the_more_is_changed_and_what_keeps_the_gradients_comes_first():
    config, shape = plan("gsm8k-coder-1.5b-h200")
    found = {gib: keys(fit(config, shape, gib)) for gib in range(8, 140, 2)}
    changes_training = [2 * ("model.lora.rank" in chosen) + ("train.moments" in chosen) for chosen in found.values()]
    assert changes_training == sorted(changes_training, reverse=True)
    assert {0, 1, 2} == set(changes_training)
    assert all("train.gradient_checkpointing" in chosen for chosen in found.values() if "train.moments" in chosen)


def test_micro_batches_shrink_until_some_responses_have_room_and_never_below_one_response():
    config, shape = plan("gsm8k-coder-1.5b-h200", "train.tokens_per_microbatch=1000000")
    found = fit(config, shape, 48)
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    assert longest <= found.config.train.tokens_per_microbatch < 1_000_000
    assert found.at_full_length >= COMFORTABLE


def test_several_gpus_keep_moments_in_host_memory_instead_of_8_bits():
    config, shape = plan("dapo-math-7b-8x80gb")
    moments = {keys(fit(config, shape, gib)).get("train.moments") for gib in range(8, 80)}
    assert moments == {None, "host"}


def test_frozen_weights_in_eight_bits_and_then_four_are_the_last_resort():
    seven = "model.path=Qwen/Qwen2.5-7B-Instruct"
    config, shape = plan("gsm8k-1.5b-24gb", seven)
    chosen = {gib: keys(fit(config, shape, gib)).get("model.lora.quantization") for gib in range(14, 40, 2)}
    assert list(dict.fromkeys(chosen.values())) == ["nf4", "int8", None]  # each on the larger card than the one before
    eight, _ = plan("gsm8k-1.5b-24gb", seven, "model.lora.quantization=int8")
    assert keys(fit(eight, shape, 12))["model.lora.quantization"] == "nf4"
    assert "model.lora.quantization" not in keys(fit(eight, shape, 24))
    from_all_weights = keys(fit(*plan("gsm8k-coder-1.5b-h200", seven), device_gib=16))
    assert from_all_weights.keys() >= {"model.lora.rank", "model.lora.quantization"}
    assert not fit(config, shape, 14, ["model.lora.quantization"]).is_possible
    assert not fit(*plan("gsm8k-1.5b-24gb", seven, "rollout.engine=vllm"), device_gib=14).is_possible

    divided = ("cluster.backend=torchrun", "cluster.gpus=2", "cluster.shard=full")  # codes cannot be
    assert "model.lora.quantization" not in keys(fit(*plan("gsm8k-1.5b-24gb", seven, *divided), device_gib=8))


def test_a_kv_cache_that_fits_or_was_typed_stays():
    recipe, key = "gsm8k-coder-1.5b-h200", "rollout.kv_cache_gib"
    assert keys(fit(*plan(recipe, f"{key}=1"), device_gib=139)) == {}
    large, shape = plan(recipe, f"{key}=200")
    assert keys(fit(large, shape, 139))[key] < 100
    assert keys(fit(large, shape, 139, [key])) == {}


@pytest.mark.parametrize(("gpus", "parallel", "each"), [(1, 1, 100), (3, 1, 34), (8, 2, 25), (1, 2, 100)])
def test_the_sequences_that_are_allowed_are_shared_by_the_copies_of_the_model(gpus: int, parallel: int, each: int):
    sets = ["rollout.max_concurrent_sequences=100", "rollout.engine=vllm", f"rollout.tensor_parallel={parallel}"]
    config, shape = plan("gsm8k-1.5b-24gb", *sets)
    memory = memory_of(config, shape, is_cuda=True, gpus=1)
    found = concurrency_of(config, memory, device_gib=80, gpus=gpus)
    assert (found.replicas, found.allowed) == (max(1, gpus // parallel), each)


def test_vllm_gets_its_own_weights_and_what_is_left():
    found = fit(*plan("gsm8k-coder-1.5b-h200", "rollout.engine=vllm"), device_gib=80)
    share = keys(found)["rollout.vllm.gpu_memory_utilization"]
    assert isinstance(share, float)
    held = found.memory.fixed - found.memory.parts["engine's own weights"]
    assert 0 <= (1 - FREE) - held / (80 * GIB) - share < 0.01


def test_a_critic_gets_no_adapter():
    assert "model.lora.rank" not in keys(fit(*plan("gsm8k-coder-1.5b-h200", "preset=vapo"), device_gib=24))


def test_what_was_typed_stays():
    config, shape = plan("gsm8k-coder-1.5b-h200")
    kept = ["train.moments", "model.lora.rank", "train.tokens_per_microbatch", "train.gradient_checkpointing"]
    found = fit(config, shape, 8, kept)
    assert not found.is_possible
    assert found.choices == []


@pytest.mark.parametrize(("text", "gib"), [("24gb", 24), ("24", 24), ("7.5 GiB", 7.5), ("RTX4090", 24), ("h200", 139)])
def test_a_card_is_a_size_or_a_name(text: str, gib: float):
    assert card_gib(text) == gib


@pytest.mark.parametrize("text", ["24tb", "0gb", "-1", "rtx490", ""])
def test_another_word_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=f"--fit {text}: neither") as refused:
        card_gib(text)
    assert "--fit 24gb" in refused.value.remedy


def test_auto_is_the_smallest_card_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.planning.fit.gpu_memory_gib", lambda: [79.0, 23.5])
    assert card_gib("auto") == 23.5
    monkeypatch.setattr("dapo.planning.fit.gpu_memory_gib", list)
    with pytest.raises(ConfigError, match="--fit auto: no GPU was found here"):
        card_gib("auto")


def test_train_says_what_it_chose_and_refuses_what_does_not_fit(tmp_path: Path):
    asked = ["train", "gsm8k-coder-1.5b-h200", "--set", f"data.train={tmp_path / 'none.jsonl'}", "--fit", "32gb"]
    small = dapo(*asked)
    assert "--fit 32gb: " in small.stdout
    assert "--set train.moments=int8" in small.stdout
    assert "none.jsonl" in small.stderr  # and only then looks at the data
    assert "--set train.moments" not in dapo(*asked, "--set", "train.moments=float32").stdout
    refused = dapo("train", "dapo-math-7b-8x80gb", "--fit", "8gb")
    assert refused.returncode == 2
    assert "--fit 8gb: dapo-math-7b-8x80gb does not fit." in refused.stderr
    assert "GB or more (--fit" in refused.stderr
    nowhere = dapo("train", "quickstart", "--fit", "8gb", "--set", "model.device=cpu")
    assert (nowhere.returncode, "is for GPUs" in nowhere.stderr) == (2, True)
