"""TRL's GRPOTrainer as the peer in `dapo bench parity`, in a process and an interpreter of its own.

Usage: python trl_parity.py FOLDER, with plan.json there. Imports nothing of dapo, so that it also runs where only TRL
is installed. TRL's own code generates, scores, averages and updates; where rollouts are recorded, its `rollout_func`
hands them out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its rollout_func may change from version to version: pinned in CI
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    import torch
    import transformers
    import trl

    torch.set_num_threads(plan["threads"])
    versions = f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    if "cases" in plan:
        for case in plan["cases"]:
            replay(folder / case)
    else:
        train(folder, plan)
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's own end may take minutes


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
    rewards: list[Any] = [recorded_reward, recorded_part]

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
        reward_funcs=rewards[: len(settings.get("reward_weights", [1.0]))],
        args=trl_config(settings, folder),
        train_dataset=Dataset.from_list([{"prompt": group["prompt"]} for step in steps for group in step]),
        rollout_func=lambda prompts, _trainer: rollouts(next(recorded), prompts),
        callbacks=[Updates()],
    )
    trainer.model.load_state_dict(load_file(folder.parent / "policy.safetensors"))  # the reference is another model
    with rows_in_order_of(folder / "update_rows.json"):
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
        "length": [response["length"] for _, response in rows],
    }


@contextmanager
def rows_in_order_of(file: Path) -> Iterator[None]:
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


def recorded_part(length: list[float], **_: Any) -> list[float]:
    return length


# ------------------------------------------------------------------ a whole run


def train(folder: Path, plan: dict[str, Any]) -> None:
    """From the start or the newest checkpoint to the end, or as far as the time goes."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    ask = question_pipe()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(plan["model"], padding_side="left")
    check_prompts(tokenizer, rows)
    settings = read_config(folder) | {"use_cpu": plan["use_cpu"], "use_vllm": plan["use_vllm"], "logging_steps": 1}
    settings["logging_strategy"] = "steps"  # each step's reward, length, entropy and gradient norm
    settings.pop("model_name_or_path")
    if plan["use_vllm"]:
        settings = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3} | settings
    options = trl_config(settings, folder)
    parts = {"generation": 0.0, "rewards": 0.0}  # seconds of the step under way

    class Timed(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        def _generate(self, *given: Any, **more: Any) -> Any:
            """With the new weights on their way into vLLM; it returns lists, so that no work of the card is pending."""
            start = time.perf_counter()
            generated = super()._generate(*given, **more)
            parts["generation"] += time.perf_counter() - start
            return generated

    def reward(completions: list[Any], completion_ids: list[list[int]], row: list[int], **_: Any) -> Any:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        cut = [len(ids) >= options.max_completion_length and ids[-1] not in ends for ids in completion_ids]
        asked = zip(row, texts, cut, strict=True)
        start = time.perf_counter()
        told = ask([{"row": r, "text": text, "is_truncated": is_cut} for r, text, is_cut in asked])
        parts["rewards"] += time.perf_counter() - start
        return told

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=[reward],
        args=options,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "row": row["row"]} for row in rows]),
        callbacks=[watch(folder, plan, parts)],
    )
    ends = set(trainer.eos_token_ids)
    checkpoints = sorted((folder / "out").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    if trainer.state.global_step >= options.max_steps:
        (folder / "finished").touch()


def question_pipe() -> Any:
    """Asks whoever started this process, a JSON line for a JSON line; what else is printed goes to stderr."""
    asked = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def ask(question: Any) -> Any:
        asked.write(json.dumps(question) + "\n")
        asked.flush()
        return json.loads(sys.stdin.readline())

    return ask


def check_prompts(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    """TRL's tokens of a prompt must be those that the other side trains on."""
    for row in rows:
        if isinstance(row["prompt"], str):
            tokens = tokenizer(text=[row["prompt"]])["input_ids"][0]
        else:
            tokens = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            tokens = tokens["input_ids"]
        if list(tokens) != row["tokens"]:
            raise SystemExit(f"problem {row['row']}: TRL makes other tokens of its prompt than we do")


def watch(folder: Path, plan: dict[str, Any], spent: dict[str, float]) -> Any:
    """Notes every step's seconds and parts, keeps the model where it is evaluated, stops in time with a checkpoint."""
    import torch
    from transformers import TrainerCallback

    end = time.perf_counter() + plan["seconds"]

    class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            spent.update(dict.fromkeys(spent, 0.0))
            self.start = self.now()

        def on_step_end(self, *parts: Any, **more: Any) -> None:
            state, control = parts[1], parts[2]
            line = {"step": state.global_step, "seconds": self.now() - self.start, **spent}
            with (folder / "times.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            if state.global_step in plan["snapshots"]:
                keep(more["model"], more["processing_class"], folder / f"step-{state.global_step}", plan["use_cpu"])
            if time.perf_counter() > end and state.global_step < state.max_steps:
                control.should_save = control.should_training_stop = True

        def on_log(self, *parts: Any, **more: Any) -> None:
            with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": parts[1].global_step} | more["logs"]) + "\n")

        def now(self) -> float:
            if not plan["use_cpu"]:
                torch.cuda.synchronize()
            return time.perf_counter()

    return Watch()


def keep(model: Any, tokenizer: Any, folder: Path, use_cpu: bool) -> None:
    """A model folder, whole or not at all; in 16 bits where the other side evaluates in 16 bits."""
    import torch

    aside = folder.with_name(f".{folder.name}")
    dtype = torch.float32 if use_cpu else torch.bfloat16
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    aside.replace(folder)


# ------------------------------------------------------------------ the config


def read_config(folder: Path) -> dict[str, Any]:
    import yaml

    settings: dict[str, Any] = yaml.safe_load((folder / "trl.yaml").read_text(encoding="utf-8"))
    for name in ("dataset_name", "dataset_train_split"):  # of `trl grpo`'s command line, not of GRPOConfig
        settings.pop(name, None)
    return {key: as_number(value) for key, value in settings.items()}


def as_number(value: Any) -> Any:
    """YAML takes 1e-6 for a word; TRL's command line, which knows the field's type, does not."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def trl_config(settings: dict[str, Any], folder: Path) -> Any:
    from trl import GRPOConfig

    quiet = {"output_dir": str(folder / "out"), "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    return GRPOConfig(**quiet | settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
