"""TRL's GRPOTrainer as the peer in `dapo bench parity`, in a process and an interpreter of its own.

Usage: python trl_parity.py FOLDER, with plan.json there. Imports nothing of dapo, so that it also runs where only TRL
is installed. TRL's own code generates, scores, averages and updates; where rollouts are recorded, its `rollout_func`
hands them out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its rollout_func may change from version to version: pinned in CI
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    import torch
    import transformers
    import trl

    torch.set_num_threads(plan["threads"])
    for case in plan["cases"]:
        replay(folder / case)
    versions = f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")


# ------------------------------------------------------------------ recorded rollouts


def replay(folder: Path) -> None:
    """One case: the recorded rollouts through GRPOTrainer.train; every update's loss, gradient and new weights."""
    import torch
    from datasets import Dataset
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    settings = read_config(folder)
    steps = json.loads((folder.parent / "rollouts.json").read_text(encoding="utf-8"))
    recorded = iter(steps)
    found: dict[str, Any] = {}
    losses: list[float] = []

    class Watched(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        def compute_loss(self, *parts: Any, **more: Any) -> Any:
            loss = super().compute_loss(*parts, **more)
            losses.append(float(loss.detach()))
            return loss

    class Updates(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Gradients as the optimizer gets them, summed over micro-batches and clipped; weights as it leaves them."""

        def on_pre_optimizer_step(self, *parts: Any, **more: Any) -> None:
            update = parts[1].global_step
            for name, parameter in more["model"].named_parameters():
                found[f"{update}/gradient/{name}"] = parameter.grad.clone()
            found[f"{update}/loss/"] = torch.tensor(sum(losses), dtype=torch.float64)
            losses.clear()

        def on_optimizer_step(self, *parts: Any, **more: Any) -> None:
            for name, parameter in more["model"].named_parameters():
                found[f"{parts[1].global_step}/weights/{name}"] = parameter.detach().clone()

    trainer = Watched(
        model=settings.pop("model_name_or_path"),
        processing_class=AutoTokenizer.from_pretrained(folder.parent / "reference", padding_side="left"),
        reward_funcs=[recorded_reward],
        args=trl_config(settings, folder),
        train_dataset=Dataset.from_list([{"prompt": group["prompt"]} for step in steps for group in step]),
        rollout_func=lambda prompts, _trainer: rollouts(next(recorded), prompts),
        callbacks=[Updates()],
    )
    trainer.model.load_state_dict(load_file(folder.parent / "policy.safetensors"))  # the reference is another model
    with dealt_as(folder / "deal.json"):
        trainer.train()
    save_file(found, folder / "trl.safetensors")


def rollouts(groups: list[dict[str, Any]], prompts: list[str]) -> dict[str, list[Any]]:
    """What `rollout_func` returns; TRL asks for every prompt as often as it has responses."""
    rows = [(group, response) for group in groups for response in group["responses"]]
    assert [group["prompt"] for group, _ in rows] == prompts, "TRL asks for other prompts than were recorded"
    return {
        "prompt_ids": [group["prompt_tokens"] for group, _ in rows],
        "completion_ids": [response["tokens"] for _, response in rows],
        "logprobs": [response["logp"] for _, response in rows],
        "recorded": [response["reward"] for _, response in rows],
    }


@contextmanager
def dealt_as(file: Path) -> Iterator[None]:
    """Which rows an update gets, where there are several: in the file's order instead of a random one."""
    from trl.trainer import grpo_trainer

    shuffle = grpo_trainer.shuffle_sequence_dict
    orders = iter(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def ordered(batch: dict[str, Any]) -> Any:
        if orders is None:
            return shuffle(batch)
        order = next(orders)
        return {name: x[order] if getattr(x, "ndim", 0) else x for name, x in batch.items()}

    grpo_trainer.shuffle_sequence_dict = ordered
    try:
        yield
    finally:
        grpo_trainer.shuffle_sequence_dict = shuffle


def recorded_reward(recorded: list[float], **_: Any) -> list[float]:
    return recorded


# ------------------------------------------------------------------ the config


def read_config(folder: Path) -> dict[str, Any]:
    import yaml

    settings: dict[str, Any] = yaml.safe_load((folder / "trl.yaml").read_text(encoding="utf-8"))
    for name in ("dataset_name", "dataset_train_split"):  # of `trl grpo`'s command line, not of GRPOConfig
        settings.pop(name, None)
    return settings


def trl_config(settings: dict[str, Any], folder: Path) -> Any:
    from trl import GRPOConfig

    quiet = {"output_dir": str(folder / "out"), "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    return GRPOConfig(**quiet | settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
