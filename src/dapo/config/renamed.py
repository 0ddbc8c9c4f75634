"""Former names of keys and metrics, and their present names. CHANGELOG.md has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {
    "algorithm.importance_cap": "algorithm.correction.cap",
    "algorithm.mean": "algorithm.loss_aggregation",
    "algorithm.mean_constant_tokens": "algorithm.loss_constant_tokens",
    "rewards.seconds": "rewards.cpu_seconds",
    "rollout.max_concurrent_responses": "rollout.max_concurrent_sequences",
    "rollout.vllm.gpu_memory_share": "rollout.vllm.gpu_memory_utilization",
    "rollouts.every_steps": "records.every_steps",
    "train.grad_clip": "train.max_grad_norm",
}
VALUES = {("model.path", "embedded"): "bundled", ("rollout.on_fault", "go_on"): "continue"}
# Not only another name: what to use instead, in words.
REPLACED = {
    "algorithm.critic.pretrain_steps": "algorithm.critic.pretrain_responses, which counts responses: steps x "
    "sampling.prompts_per_step x sampling.responses_per_prompt",
}
METRICS = {
    "critic/gradient_norm": "critic/grad_norm",
    "length/right": "length/correct",
    "policy/gradient_norm": "policy/grad_norm",
    "sampling/acceptance": "sampling/groups_kept",
    "sampling/groups_all_right": "sampling/groups_all_correct",
    "sampling/informative_per_1000_tokens": "sampling/mixed_per_1000_tokens",
    "sampling/rested": "sampling/retired",
    "source/NAME/rested": "source/NAME/retired",
    "timing.sampling_s": "timing.rollout_s",
    "tokens/wasted_all_right": "tokens/wasted_all_correct",
}


def in_todays_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config of a run that an earlier version wrote, under today's names."""
    now = {KEYS.get(key, key): value for key, value in keys.items()}
    now |= {key: new for (key, old), new in VALUES.items() if now.get(key) == old}
    steps = now.pop("algorithm.critic.pretrain_steps", 0)
    if steps:
        per_step = now["sampling.prompts_per_step"] * now["sampling.responses_per_prompt"]
        now.setdefault("algorithm.critic.pretrain_responses", steps * per_step)
    return now


def in_todays_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same for nested tables that anybody may have written: what is not as expected stays as it is."""
    now = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    for old, new in KEYS.items():
        *path, name = old.split(".")
        table: Any = now
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict) and name in table:
            _put(now, new, table[name])
    return now


def _put(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        below = tables.get(part)
        tables[part] = tables = dict(below) if isinstance(below, dict) else {}
    tables.setdefault(name, value)


def in_todays_metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    return {_todays_metric(name): value for name, value in line.items()}


def _todays_metric(name: str) -> str:
    """`source/NAME/rested` in the table stands for every source of a mixture."""
    prefix, _, metric = name.rpartition("/")
    if prefix.startswith("source/") and (now := METRICS.get(f"source/NAME/{metric}")):
        return f"{prefix}/{now.rpartition('/')[2]}"
    return METRICS.get(name, name)
