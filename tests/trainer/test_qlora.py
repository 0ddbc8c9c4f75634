"""QLoRA: a run on a quantized base is LoRA on the weights that its codes stand for, and resumes exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from toy import recipe

from command_line import dapo
from dapo.config.load import parse_override
from dapo.files import read_lines
from dapo.models.load import load_policy
from dapo.models.packing import pack
from dapo.models.policy import WithoutAdapter
from dapo.models.quantized import Kind, dequantize, quantize
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from dapo.trainer.run import Run
from dapo.trainer.start import start_run

# grpo: with a reference; the seed: one with mixed groups in the first step
ADAPTER = ["model.lora.rank=2", "model.lora.alpha=4", "preset=grpo", "train.steps=2", "train.seed=3"]
KEYS: dict[Kind, list[str]] = {
    "int8": [*ADAPTER, "model.lora.quantization=int8"],
    "nf4": [*ADAPTER, "model.lora.quantization=nf4"],
}


def run_toy(folder: Path, name: str, *overrides: str, dtype: str = "float32") -> Run:
    run = start_run(recipe(folder, *overrides, dtype=dtype), folder / name)
    train(run)
    run.close()
    return run


def metrics(run: Run) -> list[dict[str, Any]]:
    lines = read_lines(run.folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(("timing", "memory"))} for line in lines]


def saved(run: Run, name: str = "state") -> dict[str, torch.Tensor]:
    newest = max((run.folder / "checkpoints").iterdir())
    return load_file(newest / {"state": "state.safetensors", "model": "model/model.safetensors"}[name])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KEYS)
def test_a_run_is_that_of_lora_on_the_weights_the_codes_stand_for(tmp_path: Path, kind: Kind):
    """Policy, engine, π_old and the reference read the same numbers: every metric and the adapter agree to the bit."""
    run = run_toy(tmp_path, "run", *KEYS[kind])
    file = tmp_path / "model" / "model.safetensors"
    base = {
        name: dequantize(*quantize(weight, kind), weight.shape, weight.dtype) if "_proj.weight" in name else weight
        for name, weight in ((name, weight.float()) for name, weight in load_file(file).items())
    }
    save_file(base, file, metadata={"format": "pt"})
    plain = run_toy(tmp_path, "plain", *ADAPTER)
    assert metrics(run) == metrics(plain)
    assert any(line["policy/kl_ref"] > 0 for line in metrics(run))
    for name in ("state", "model"):
        assert same(saved(run, name), saved(plain, name))


@pytest.mark.parametrize("kind", KEYS)
def test_it_resumes_exactly(tmp_path: Path, kind: Kind):
    straight = run_toy(tmp_path, "straight", *KEYS[kind])
    run_toy(tmp_path, "halved", *KEYS[kind], "train.steps=1")
    resumed = resume_run(tmp_path / "halved", [parse_override("train.steps=2")])
    train(resumed)
    resumed.close()
    assert metrics(resumed) == metrics(straight)
    for name in ("state", "model"):
        assert same(saved(resumed, name), saved(straight, name))


@pytest.mark.parametrize("kind", KEYS)
def test_the_adapter_alone_is_loaded_by_peft_over_the_same_codes(tmp_path: Path, kind: Kind):
    from peft import PeftModel

    run = run_toy(tmp_path, "run", *KEYS[kind], "train.steps=1")
    done = dapo("export", str(run.folder), "--out", str(tmp_path / "adapter"), "--adapter")
    assert "the adapter after step 1" in done.stdout
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    base = load_policy(str(tmp_path / "model"), dtype=torch.float32, device="cpu", quantization=kind)
    base.model = PeftModel.from_pretrained(base.model, tmp_path / "adapter")
    packed = pack([[3, 4, 5]], [[8, 9, 2]], "cpu")
    got, trained = (policy(packed, temperature=1.0)[0].detach() for policy in (base, run.learner.policy))
    assert torch.equal(got, trained)
    assert not torch.equal(WithoutAdapter(base)(packed, temperature=1.0)[0], trained)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft\n" in card
    assert "over 16 bits it is another model" in card
    assert "Export without `--adapter` writes the one that was trained." in card
    dapo("export", str(run.folder), "--out", str(tmp_path / "merged"))
    assert not (tmp_path / "merged" / "adapter").exists()
    merged = load_policy(str(tmp_path / "merged"), dtype=torch.float32, device="cpu")
    assert_close(merged(packed, temperature=1.0)[0].detach(), trained, atol=1e-4, rtol=0)


def test_dropout_does_not_depend_on_micro_batches_recomputation_or_a_restart(tmp_path: Path):
    """All of it drops the same values; sampling and π_old drop none, so the first update's ratio is not 1."""
    keys = [*KEYS["nf4"], "model.lora.dropout=0.3", "preset=grpo", "train.updates_per_step=1"]
    straight = run_toy(tmp_path, "straight", *keys, dtype="float64")
    for name, other in {"split": "train.tokens_per_microbatch=1", "again": "train.gradient_checkpointing=true"}.items():
        run = run_toy(tmp_path, name, *keys, other, dtype="float64")
        for key, weight in saved(straight, "model").items():
            assert_close(saved(run, "model")[key], weight, atol=1e-9, rtol=0)
    run_toy(tmp_path, "halved", *keys, "train.steps=1", dtype="float64")
    resumed = resume_run(tmp_path / "halved", [parse_override("train.steps=2")])
    train(resumed)
    resumed.close()
    assert metrics(resumed) == metrics(straight)
    assert same(saved(resumed), saved(straight))
    last = metrics(straight)[-1]
    assert last["policy/kl_old"] != 0
    assert last["engine/kl"] < 1e-12, "the policy that samples is π_old"
