"""TRL's GRPOTrainer in its DAPO setting as a peer in `dapo bench step`, in a process and an interpreter of its own.

Usage: python trl_peer.py FOLDER, with plan.json and the model there; prints one JSON line. Imports nothing of dapo, so
that it also runs where only TRL is installed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    import torch
    import transformers
    import trl

    torch.set_num_threads(plan["threads"])
    marks: list[tuple[float, float]] = []
    trainer = make_trainer(plan, folder, marks)
    trainer.train()
    version = f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"trl": version, "marks": marks, "settings": settings_of(plan)}), flush=True)
    os._exit(0)  # vLLM's own end may take minutes


def settings_of(plan: dict[str, Any]) -> str:
    engine = "vLLM in the same process" if plan["use_vllm"] else "generate of transformers"
    precision = "bf16 autocast" if plan["device"] == "cuda" else "float32"
    return f'loss_type="dapo", {engine}, {precision}, {plan["micro"]} rows a micro-batch'


def make_trainer(plan: dict[str, Any], folder: Path, marks: list[tuple[float, float]]) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    is_cuda = plan["device"] == "cuda"

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def mark(self) -> None:
            if is_cuda:
                torch.cuda.synchronize()
            marks.append((time.perf_counter(), time.process_time()))

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.mark()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.mark()

    rows = plan["prompts"] * plan["responses"]
    at_least: dict[str, Any] = {"ignore_eos": True} if plan["use_vllm"] else {"min_new_tokens": plan["tokens"]}
    more: dict[str, Any] = {}
    if plan["use_vllm"]:
        more = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    options = GRPOConfig(
        output_dir=str(folder / "out"), report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        seed=plan["seed"], use_cpu=not is_cuda, bf16=is_cuda, fp16=False, gradient_checkpointing=False,
        per_device_train_batch_size=plan["micro"], gradient_accumulation_steps=rows // plan["micro"],
        num_generations=plan["responses"], max_completion_length=plan["tokens"], max_steps=plan["steps"],
        learning_rate=plan["lr"], lr_scheduler_type="constant",
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, mask_truncated_completions=False,
        scale_rewards="group", num_iterations=1, temperature=1.0, top_p=1.0, top_k=0,
        use_vllm=plan["use_vllm"], generation_kwargs=at_least, **more,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "peer", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "peer", padding_side="left"),
        reward_funcs=[digit_fraction],
        args=options,
        train_dataset=Dataset.from_list([{"prompt": sum_of(i)} for i in range(plan["prompts"] * plan["steps"])]),
        callbacks=[Clock()],
    )


def digit_fraction(completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model already gets some of: the fraction of digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def sum_of(i: int) -> str:
    """The i-th prompt, always 8 characters."""
    generator = random.Random(i)
    return f"{generator.randrange(100, 1000)}+{generator.randrange(100, 1000)}="


if __name__ == "__main__":
    main(Path(sys.argv[1]))
