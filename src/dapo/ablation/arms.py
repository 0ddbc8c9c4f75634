"""The arms of a ladder as data: what each sets on top of a recipe, what it is compared with, what was published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapo.config.checks import retired_after_two
from dapo.config.load import load_recipe, suggest
from dapo.config.schema import Config
from dapo.errors import ConfigError

Overrides = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """One line of the table. `overrides` are what `dapo train RECIPE --set …` gets."""

    name: str  # as typed after --arms, and the name of its folder
    label: str
    overrides: Overrides
    compared_with: str | None = None  # the arm it is compared with
    sized: Callable[[Config], Overrides] | None = None  # overrides that depend on the recipe's sizes
    kind: str = "other"  # rung (of the ladder from naive GRPO to DAPO), other or control

    def overrides_for(self, config: Config) -> Overrides:
        return self.overrides + (self.sized(config) if self.sized is not None else ())


# The switches of the DAPO paper's Table 1 as naive GRPO has them. Each arm of the ladder says all of them, so that no
# key of a recipe can change it; each changes one.
NAIVE = {
    "shaping.overlong_filter": "false",
    "algorithm.clip.high": "0.2",
    "shaping.overlong_penalty": "0.0",
    "algorithm.loss_aggregation": "sequence",
    "sampling.dynamic": "false",
}
STEPS_OF_THE_LADDER = (
    ("overlong-filter", "+ overlong filtering", "shaping.overlong_filter", "true"),
    ("clip-higher", "+ clip-higher", "algorithm.clip.high", "0.28"),
    ("soft-penalty", "+ soft overlong penalty", "shaping.overlong_penalty", "1.0"),
    ("token-loss", "+ token-level loss", "algorithm.loss_aggregation", "token"),
    ("dapo", "+ dynamic sampling (DAPO)", "sampling.dynamic", "true"),
)


def ladder() -> tuple[Arm, ...]:
    """Naive GRPO, then each arm adds one technique, in the paper's order; the last is DAPO."""
    switches = dict(NAIVE)
    made = [Arm("naive", "naive GRPO", as_overrides(switches), kind="rung")]
    for name, label, key, value in STEPS_OF_THE_LADDER:
        switches[key] = value
        made.append(Arm(name, label, as_overrides(switches), compared_with=made[-1].name, kind="rung"))
    return tuple(made)


def as_overrides(switches: dict[str, str]) -> Overrides:
    return ("preset=grpo-naive", *(f"{key}={value}" for key, value in switches.items()))


def one_response_each(config: Config) -> Overrides:
    """The same number of responses per step, each to a different problem."""
    return (f"sampling.prompts_per_step={config.responses_per_step}", "sampling.responses_per_prompt=1")


def reachable_bound(config: Config) -> Overrides:
    """ScaleRL's pass rate of 0.9, or one that groups as small as these can reach."""
    return (f"sampling.retire_above={min(0.9, retired_after_two(config.sampling.responses_per_prompt))}",)


LADDER = ladder()
VAPO = ("preset=vapo",)
# What VAPO's paper takes away, piece by piece. Without decoupled GAE critic and policy use λ = 0.95 and their own;
# without the length-adaptive one λ = 0.95, as its vanilla PPO has.
VAPO_PIECES: tuple[tuple[str, str, Overrides], ...] = (
    ("vapo-no-pretraining", "VAPO − value pretraining", ("algorithm.critic.pretrain_responses=0",)),
    ("vapo-no-decoupled", "VAPO − decoupled GAE", ("algorithm.gae.lam_critic=none",)),
    ("vapo-no-adaptive", "VAPO − length-adaptive GAE", ("algorithm.gae.length_adaptive_alpha=none",)),
    ("vapo-no-clip-higher", "VAPO − clip-higher", ("algorithm.clip.high=0.2",)),
    ("vapo-no-token-loss", "VAPO − token-level loss", ("algorithm.loss_aggregation=sequence",)),
    ("vapo-no-positive", "VAPO − positive-example LM loss", ("algorithm.positive_nll=0.0",)),
)
OTHERS = (
    Arm("dapo-fast", "DAPO-fast (not the paper's)", ("preset=dapo-fast",), compared_with="dapo"),
    Arm("grpo", "GRPO with KL", ("preset=grpo",), compared_with="naive"),
    Arm("dr-grpo", "Dr. GRPO", ("preset=dr-grpo",), compared_with="naive"),
    Arm("cispo", "CISPO (MiniMax-M1)", ("preset=cispo",), compared_with="dapo"),
    Arm("gspo", "GSPO (Qwen)", ("preset=gspo",), compared_with="naive"),
    Arm(  # the pass rate at which a problem is retired depends on the group's size
        "scalerl",
        "ScaleRL (what of it is an algorithm)",
        ("preset=scalerl", "sampling.retire_above=none"),
        compared_with="cispo",
        sized=reachable_bound,
    ),
    Arm("reinforce++", "REINFORCE++", ("preset=reinforce++",), compared_with="naive"),
    Arm(  # its loss has no ratio that could correct for an older policy
        "rloo",
        "RLOO, one update per step",
        ("preset=rloo", "train.updates_per_step=1", "train.epochs_per_step=1"),
        compared_with="naive",
    ),
    Arm("rft", "rejection-sampling fine-tuning", ("preset=rft",), compared_with="naive"),
    Arm("ppo", "PPO", ("preset=ppo",), compared_with="naive"),
    Arm("vanilla-ppo", "vanilla PPO (VAPO's baseline)", ("preset=vanilla-ppo",), compared_with="ppo"),
    Arm("vapo", "VAPO", VAPO, compared_with="ppo"),
    *(Arm(name, label, VAPO + change, compared_with="vapo") for name, label, change in VAPO_PIECES),
    Arm("vapo-no-groups", "VAPO − group sampling", VAPO, compared_with="vapo", sized=one_response_each),
    Arm(
        "dapo-shuffled",
        "control: DAPO, rewards shuffled within groups",
        (*LADDER[-1].overrides, "rewards.control=shuffled"),
        compared_with="dapo",
        kind="control",
    ),
    Arm(
        "vapo-zero-critic",
        "control: VAPO, critic frozen at zero",
        (*VAPO, "algorithm.critic.lr=0.0", "algorithm.critic.pretrain_responses=0"),
        compared_with="vapo",
        kind="control",
    ),
)
ARMS = {arm.name: arm for arm in (*LADDER, *OTHERS)}


def choose_arms(text: str) -> tuple[Arm, ...]:
    """`ladder`, `all`, or comma-separated names; in the order of the table."""
    if text == "ladder":
        return LADDER
    if text == "all":
        return tuple(ARMS.values())
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in ARMS:
            raise ConfigError(f"--arms {name}: no such arm.", remedy=suggest(name, ["ladder", "all", *ARMS]))
    if not wanted:
        raise ConfigError(f"--arms {text!r}: names no arm.", remedy=f"Use ladder, all, or some of: {', '.join(ARMS)}.")
    return tuple(arm for name, arm in ARMS.items() if name in wanted)


def arm_config(recipe: str, arm: Arm, extra: Sequence[str] = ()) -> tuple[Config, Overrides]:
    """An arm's config on a recipe, and all its overrides; `extra` wins over the arm."""
    sizes = load_recipe(recipe, [*arm.overrides, *extra]).config
    overrides = (*arm.overrides_for(sizes), *extra)
    return load_recipe(recipe, overrides).config, overrides
