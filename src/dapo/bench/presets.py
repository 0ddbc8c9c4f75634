"""`dapo bench train --preset A,B`: memory and time of one step's update under each preset, on the same responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dapo.config.load import load_recipe
from dapo.config.schema import Config
from dapo.console import table_of, wide_console

if TYPE_CHECKING:
    from dapo.bench.setting import TrainSetting
    from dapo.learner.learner import Learner
    from dapo.types import Group

RECIPE = "gsm8k-1.5b-24gb"  # only its sizes matter here, and these are set below
PROMPTS, RESPONSES = 8, 8


def compare_presets(setting: TrainSetting, presets: Sequence[str]) -> dict[str, Any]:
    """One update of each preset after another, each with models of its own; one epoch, one update, for all."""
    rows = {name: measure_preset(setting, name) for name in presets}
    first = rows[presets[0]]
    for row in rows.values():
        if row and first:
            row["time_of_first"] = row["ms"] / first["ms"]
            row["memory_of_first"] = row["peak_gib"] / first["peak_gib"] if first["peak_gib"] else None
    return {"setting": setting.describe(), "prompts": PROMPTS, "responses": RESPONSES, "presets": rows}


def measure_preset(setting: TrainSetting, preset: str) -> dict[str, Any] | None:
    from dapo.bench.timing import free_memory, measured
    from dapo.learner.batch import make_batch
    from dapo.learner.update import update_policy

    free_memory()
    cap, budget = (8192, 16384) if setting.device == "cuda" else (128, 1024)
    config = load_recipe(
        RECIPE,
        [
            f"preset={preset}", f"sampling.prompts_per_step={PROMPTS}", f"sampling.responses_per_prompt={RESPONSES}",
            "limits.max_response_tokens=8192", "train.updates_per_step=1", "train.epochs_per_step=1",
            f"train.tokens_per_microbatch={budget}", f"train.moments={setting.moments}",
        ],
    ).config  # fmt: skip
    groups = synthetic_groups(setting.shape.vocabulary, cap)
    learner = make_synthetic_learner(setting, config)
    parts: dict[str, float] = {}

    def update() -> None:
        batch = make_batch(groups, config, setting.dtype)
        parts.update(update_policy(learner, batch, config, step=1))

    result = measured(setting, update, preset)
    if result is None:
        return None
    tokens = sum(len(completion.tokens) for group in groups for completion in group.completions)
    return {
        "ms": 1e3 * result.seconds,
        "score_ms": 1e3 * parts["timing.old_logp_s"],
        "update_ms": 1e3 * parts["timing.update_s"],
        "tokens_per_s": tokens / result.seconds,
        "peak_gib": result.peak_gib,
        "has_critic": config.has_critic,
        "has_reference": config.has_reference,
    }


def make_synthetic_learner(setting: TrainSetting, config: Config) -> Learner:
    from dapo.learner.critic import CriticLearner
    from dapo.learner.learner import Learner, make_optimizer
    from dapo.models.critic import Critic
    from dapo.models.fused_layers import fuse_layers
    from dapo.models.packed_attention import PACKED_ATTENTION
    from dapo.models.policy import Policy

    def policy() -> Policy:
        made = Policy(setting.model(PACKED_ATTENTION), None).eval()
        fuse_layers(made.backbone)
        return made

    actor = policy()
    learner = Learner(actor, make_optimizer(actor, config.train))
    if config.has_reference:
        learner.reference = policy()
        learner.reference.requires_grad_(False)
    if config.has_critic:
        critic = Critic(policy().backbone)
        learner.critic = CriticLearner(critic, make_optimizer(critic, config.train))
    return learner


def synthetic_groups(vocabulary: int, cap: int) -> list[Group]:
    """Random responses of log-normal lengths, right and wrong in turn."""
    import numpy as np

    from dapo.bench.rollout_workloads import LOG_NORMAL_MU, LOG_NORMAL_SIGMA
    from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict

    generator = np.random.default_rng(0)
    made = []
    for p in range(PROMPTS):
        lengths = np.clip(generator.lognormal(LOG_NORMAL_MU, LOG_NORMAL_SIGMA, RESPONSES), 2, cap).astype(int)
        completions = tuple(
            Completion(
                generator.integers(3, vocabulary, n).astype(np.int32),
                np.zeros(n, np.float32),
                np.zeros(n, np.int32),
                StopReason.EOS,
                "",
            )
            for n in lengths
        )
        verdicts = (Judgement(Verdict.WRONG, -1.0), Judgement(Verdict.CORRECT, 1.0))
        prompt = tuple(generator.integers(3, vocabulary, 128).tolist())
        judgements = tuple(verdicts[i % 2] for i in range(RESPONSES))
        made.append(Group(Problem(str(p), "", ""), 0, prompt, completions, judgements))
    return made


def show_presets(figures: dict[str, Any]) -> None:
    setting = figures["setting"]
    console = wide_console()
    console.print(
        f"{setting['parameters'] / 1e6:,.0f} M parameters, {setting['dtype']}, {setting['device']}; one update on "
        f"{figures['prompts']} x {figures['responses']} responses of log-normal length, one epoch"
    )
    names = ("preset", "ms", "scoring", "updating", "tokens/s", "GiB", "time", "memory", "also in memory")
    table = table_of(*names, figures=slice(1, 8))
    for name, row in figures["presets"].items():
        if row is None:
            table.add_row(name, "out of memory")
            continue
        beside = [part for part in ("critic", "reference") if row[f"has_{part}"]]
        memory = row.get("memory_of_first")
        table.add_row(
            name,
            f"{row['ms']:,.0f}",
            f"{row['score_ms']:,.0f}",
            f"{row['update_ms']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_gib']:.1f}",
            f"{row['time_of_first']:.2f}" if "time_of_first" in row else "",
            "" if memory is None else f"{memory:.2f}",
            ", ".join(beside) or "nothing",
        )
    console.print(table)
    console.print("time and memory: of the first preset. An update at equal epochs; a preset may ask for more of them.")
