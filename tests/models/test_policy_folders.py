"""Folders in and out: what is saved is what is loaded, and what cannot be used is refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from dapo.config.model_shapes import LINEAR_NAMES
from dapo.errors import ConfigError, EngineError
from dapo.models.critic import Critic, load_critic, save_critic
from dapo.models.load import check_packing, load_policy, save_policy
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.packing import pack
from dapo.models.policy import Policy, add_lora, end_tokens
from tiny_models import EOS, tiny_policy

PACKED = pack([[5, 6], [7]], [[8, 9], [10, 11, 12]], "cpu")


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_saved_and_loaded_policy_is_the_same(family: str, tmp_path: Path):
    policy = tiny_policy(family, torch.float32)
    policy.is_fused = False
    save_policy(policy, tmp_path)
    loaded = load_policy(str(tmp_path), dtype=torch.float32, device="cpu", is_fused=False)
    assert torch.equal(policy(PACKED, temperature=1.0)[0], loaded(PACKED, temperature=1.0)[0])
    assert loaded.eos_ids == (EOS,)
    assert loaded.tokenizer.decode([3, 4]) == policy.tokenizer.decode([3, 4])
    assert (loaded.device, loaded.dtype, loaded.training) == (torch.device("cpu"), torch.float32, False)


@pytest.mark.parametrize("filler", [1, 9])
def test_weights_begin_at_one_kind_of_place_wherever_they_lie_in_their_file(filler: int, tmp_path: Path):
    """A checkpoint's file has other places than the model's, and products on some CPUs other last bits for it."""
    save_policy(tiny_policy("llama-tied", torch.float32), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "filler": "x" * filler})
    for load in (load_policy, load_critic):
        loaded = load(str(tmp_path), dtype=torch.float32, device="cpu")
        places = {name: tensor.data_ptr() % 64 for name, tensor in loaded.named_parameters()}
        assert places == dict.fromkeys(places, 0)


def test_export_is_a_plain_hugging_face_folder(tmp_path: Path):
    policy = tiny_policy("qwen2", torch.float32)
    save_policy(policy, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert PACKED_ATTENTION not in (tmp_path / "config.json").read_text()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == EOS
    for (name, a), b in zip(theirs.named_parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def load_elsewhere(tmp_path: Path, *names: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Load policies by name where nothing answers at the hub's address: port 9 of this machine."""
    code = (
        "import sys, torch\nfrom dapo.errors import EngineError\nfrom dapo.models.load import load_policy\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, load_policy(name, dtype=torch.float32, device='cpu').model.num_parameters())\n"
        "    except EngineError as error: print(error)\n"
    )
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"} | settings
    return subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, env=os.environ | hub
    )


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path: Path):
    # The libraries' own retries take 20 seconds for every file they ask for.
    done = load_elsewhere(tmp_path, "owner/name", "runs/a/b", "./folder", "/" + "a" * 300)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "model.path = 'owner/name': no such folder, no such model in the cache, and http://127.0.0.1:9 cannot be "
    )
    assert "hf download owner/name" in lines[1]
    assert "model.path = 'runs/a/b': no such folder." in lines
    assert "model.path = './folder': no such folder." in lines
    assert f"model.path = '/{'a' * 300}': no such folder." in lines  # longer than a name may be
    assert "Retrying" not in done.stderr


def test_a_file_is_no_model(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match=r"model\.safetensors': is a file, not a folder"):
        load_policy(str(tmp_path / "model.safetensors"), dtype=torch.float32, device="cpu")


@pytest.mark.slow
def test_a_model_of_the_cache_needs_no_hub(tmp_path: Path):
    policy = tiny_policy("llama", torch.float32)
    cached = tmp_path / "hf" / "hub" / "models--owner--name"
    save_policy(policy, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    assert f"owner/name {policy.model.num_parameters()}" in load_elsewhere(tmp_path, "owner/name").stdout


@pytest.mark.slow
def test_what_is_wrong_with_a_model_of_the_cache_is_said(tmp_path: Path):
    cached = tmp_path / "hf" / "hub" / "models--owner--odd"
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("0" * 40) / "config.json").write_text('{"model_type": "of-another-world"}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    said = load_elsewhere(tmp_path, "owner/odd", "owner/name", HF_HUB_OFFLINE="1").stdout
    assert "model.path = 'owner/odd': cannot be loaded. " in said
    assert "of-another-world" in said
    assert "model.path = 'owner/name': no such folder, no such model in the cache, and HF_HUB_OFFLINE is set" in said


@pytest.mark.slow
def test_a_proxy_that_cannot_be_used_is_no_network(tmp_path: Path):
    said = load_elsewhere(tmp_path, "owner/name", ALL_PROXY="nonsense://127.0.0.1:9").stdout
    assert "no such model in the cache, and http://127.0.0.1:9 cannot be reached (" in said


def test_critic_takes_a_policys_backbone_and_keeps_its_own_head(tmp_path: Path):
    policy = tiny_policy("llama", torch.float32)
    save_policy(policy, tmp_path / "policy")
    critic = load_critic(str(tmp_path / "policy"), dtype=torch.float32, device="cpu")
    assert not critic(PACKED).any()
    torch.nn.init.normal_(critic.value_head.weight)
    save_critic(critic, tmp_path / "critic")
    loaded = load_critic(str(tmp_path / "critic"), dtype=torch.float32, device="cpu")
    assert torch.equal(critic(PACKED), loaded(PACKED))
    assert critic(PACKED).any()

    narrow = tiny_policy("llama", torch.float32, hidden_size=16)
    narrow.model.model.save_pretrained(tmp_path / "narrow")
    (tmp_path / "narrow" / "value_head.safetensors").write_bytes(
        (tmp_path / "critic" / "value_head.safetensors").read_bytes()
    )
    with pytest.raises(EngineError, match="the value head has"):
        load_critic(str(tmp_path / "narrow"), dtype=torch.float32, device="cpu")


def test_gradients_reach_backbone_and_head_of_the_critic():
    critic = Critic(tiny_policy("qwen2").model.model)
    critic(PACKED).sum().backward()
    assert critic.value_head.weight.grad.any()
    assert not critic.backbone.layers[0].mlp.up_proj.weight.grad.any()  # a zero head passes nothing down, yet
    torch.nn.init.normal_(critic.value_head.weight)
    critic(PACKED).sum().backward()
    assert critic.backbone.layers[0].mlp.up_proj.weight.grad.any()


def test_missing_folder_names_the_path(tmp_path: Path):
    with pytest.raises(EngineError, match="nowhere"):
        load_policy(str(tmp_path / "nowhere"), dtype=torch.float32, device="cpu")


def test_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(EngineError, match=r"no config\.json"):
        load_policy(str(tmp_path), dtype=torch.float32, device="cpu")


def test_pickled_weights_are_never_loaded(tmp_path: Path):
    policy = tiny_policy("llama", torch.float32)
    save_policy(policy, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(policy.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match="pickled weights are never loaded"):
        load_policy(str(tmp_path), dtype=torch.float32, device="cpu")


def test_an_architecture_with_capped_logits_is_refused_not_trained_wrongly():
    config = Gemma2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_logit_softcapping=None,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    model = Gemma2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    with pytest.raises(EngineError, match="cannot be trained packed"):
        check_packing(Policy(model, None))


def test_end_tokens_join_generation_config_and_tokenizer():
    policy = tiny_policy()
    policy.model.generation_config.eos_token_id = [9, EOS]
    assert end_tokens(policy.model, policy.tokenizer) == (EOS, 9)
    policy.model.generation_config.eos_token_id = 9
    assert end_tokens(policy.model, policy.tokenizer) == (EOS, 9)
    assert end_tokens(policy.model, None) == (9,)


def test_lora_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it fails
    with pytest.raises(EngineError, match="needs the package peft") as error:
        add_lora(tiny_policy(), rank=2, alpha=4.0)
    assert "dapo[lora]" in error.value.remedy


def test_lora_starts_as_the_base_trains_only_itself_and_exports_merged(tmp_path: Path):
    policy = tiny_policy("qwen2", torch.float32)
    before = policy(PACKED, temperature=1.0)[0].detach()
    add_lora(policy, rank=2, alpha=4.0)
    logp = policy(PACKED, temperature=1.0)[0]
    assert torch.equal(before, logp.detach())
    logp.sum().backward()
    trained = [name for name, parameter in policy.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    save_policy(policy, tmp_path)
    merged = load_policy(str(tmp_path), dtype=torch.float32, device="cpu")
    np.testing.assert_allclose(
        merged(PACKED, temperature=1.0)[0].detach(), policy(PACKED, temperature=1.0)[0].detach(), atol=1e-4
    )


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_folder_keeps_what_ends_a_response_and_the_chat_template(has_adapter: bool, tmp_path: Path):
    policy = tiny_policy("qwen2", torch.float32)
    policy.base.generation_config.eos_token_id = [EOS, 7]
    policy.tokenizer.chat_template = "{{ messages[0].content }} >"
    policy.eos_ids = end_tokens(policy.base, policy.tokenizer)
    save_policy(add_lora(policy, rank=2, alpha=4.0) if has_adapter else policy, tmp_path)
    loaded = load_policy(str(tmp_path), dtype=torch.float32, device="cpu")
    assert loaded.eos_ids == policy.eos_ids == tuple(sorted((EOS, 7)))
    assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template


@pytest.mark.parametrize("rank_stabilized", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj",), ()])
def test_lora_on_some_layers_and_its_scale(targets: tuple[str, ...], rank_stabilized: bool, tmp_path: Path):
    """W + s·BA with s = α/r or α/√r, on the layers named: what is saved is that sum, and W elsewhere."""
    r, alpha = 4, 3.0
    s = alpha / r**0.5 if rank_stabilized else alpha / r
    policy = tiny_policy("qwen2", torch.float64)
    before = {name: weight.clone() for name, weight in policy.base.state_dict().items()}
    add_lora(policy, r, alpha, target_modules=targets, rank_stabilized=rank_stabilized)
    adapters = {name: p for name, p in policy.base.named_parameters() if p.requires_grad}
    for name, parameter in adapters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted = {name.partition(".lora_")[0] for name in adapters}
    assert {name.rpartition(".")[2] for name in adapted} == set(targets or LINEAR_NAMES)
    save_policy(policy, tmp_path)
    merged = load_policy(str(tmp_path), dtype=torch.float64, device="cpu").base.state_dict()
    for name, W in before.items():
        owner = name.removesuffix(".weight")
        if owner in adapted and name.endswith(".weight"):
            A, B = (adapters[f"{owner}.lora_{part}.default.weight"].detach() for part in "AB")
            W = W + s * B @ A
        np.testing.assert_allclose(merged[name], W, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["lm_head", "c_attn"])
def test_a_layer_that_gets_no_adapter_is_refused_by_name(name: str):
    with pytest.raises(
        ConfigError, match=rf"model.lora.target_modules: {name}: the model has no linear layer"
    ) as raised:
        add_lora(tiny_policy(), rank=2, alpha=4.0, target_modules=(name,))
    assert "q_proj" in raised.value.remedy
