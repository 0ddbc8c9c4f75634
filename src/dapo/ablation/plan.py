"""The runs of a ladder, their folders, and the progress of each, read from the run folders alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dapo.ablation.arms import Arm, Overrides, arm_config
from dapo.config.keys import refuse_unknown
from dapo.config.load import flatten, read_toml, resolve
from dapo.config.schema import Config
from dapo.errors import ConfigError
from dapo.files import read_lines, refuse_links

UNBOUNDED_STEPS = 1_000_000  # a budget of tokens or minutes ends the run


class State(Enum):
    """How far a run has come."""

    NEW = "new"
    HALF_DONE = "half done"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class ArmBudget:
    """The budget of every arm; the recipe's own where `kind` is empty."""

    kind: str = ""  # steps, tokens or minutes
    amount: float = 0

    @property
    def overrides(self) -> Overrides:
        if not self.kind:
            return ()
        if self.kind == "steps":
            return (f"train.steps={int(self.amount)}",)
        spent = {
            "tokens": f"train.max_generated_tokens={int(self.amount)}",
            "minutes": f"train.max_minutes={float(self.amount)}",
        }
        return (f"train.steps={UNBOUNDED_STEPS}", spent[self.kind])

    def __str__(self) -> str:
        return f"{self.kind}={self.amount:g}" if self.amount < 1e6 else f"{self.kind}={int(self.amount)}"


def parse_budget(text: str | None) -> ArmBudget:
    """`steps=N`, `tokens=N` or `minutes=N`; None leaves the recipe's steps."""
    if text is None:
        return ArmBudget()
    match = re.fullmatch(
        r"\s*(steps|tokens|minutes)\s*=\s*([0-9]{1,12}|[0-9]{1,3}(?:_[0-9]{3}){1,4}|[0-9]{1,12}\.[0-9]{1,9})\s*", text
    )
    remedy = "Write steps=60, tokens=500000 or minutes=2.5."
    if match is None:
        raise ConfigError(f"--budget {text}: not a budget.", remedy=remedy)
    kind, amount = match[1], float(match[2])
    if amount <= 0 or (kind != "minutes" and amount != int(amount)):
        raise ConfigError(f"--budget {text}: must be a positive {'number' if kind == 'minutes' else 'whole number'}.",
                          remedy=remedy)  # fmt: skip
    return ArmBudget(kind, amount)


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0,1,2`: whole numbers, each once."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise ConfigError(f"--seeds {text}: must be comma-separated integers.", remedy="Write --seeds 0,1,2.")
    seeds = tuple(int(part) for part in parts)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: names a seed twice.", remedy="Name each seed once.")
    return seeds


@dataclass(frozen=True, slots=True)
class Job:
    """One run: an arm with a seed, in a folder of its own."""

    arm: Arm
    seed: int
    folder: Path
    config: Config
    overrides: Overrides

    @property
    def name(self) -> str:
        return f"{self.arm.name} seed {self.seed}"

    @property
    def log(self) -> Path:
        """What `dapo train` printed; beside the run, which must be new when it starts."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def arguments(self, recipe: str) -> list[str]:
        """Arguments of `dapo` that start or resume the run. `check_settings` has checked both."""
        if self.state is State.HALF_DONE:
            return ["resume", str(self.folder), "--trust"]
        sets = [part for override in self.overrides for part in ("--set", override)]
        return ["train", recipe, *sets, "--out", str(self.folder), "--trust"]

    @property
    def state(self) -> State:
        """Done: its last step is evaluated and saved."""
        if not (self.folder / "config.toml").is_file():
            return State.NEW
        step = self.steps_done
        is_over = step >= self.config.train.steps or any(
            event.get("kind") == "budget" and event.get("step") == step
            for event in read_lines(self.folder / "events.jsonl")
        )
        is_evaluated = any(line.get("step") == step for line in read_lines(self.folder / "eval.jsonl"))
        is_saved = (self.folder / "checkpoints" / f"step-{step:06d}" / "MANIFEST.json").is_file()
        return State.DONE if is_over and is_evaluated and is_saved else State.HALF_DONE

    @property
    def steps_done(self) -> int:
        return max((int(line.get("step", 0)) for line in read_lines(self.folder / "metrics.jsonl")), default=0)

    def check_settings(self) -> None:
        """An existing run must have the same settings."""
        out, arm, seed = self.folder.parents[1], self.arm.name, self.folder.name
        refuse_links(out, arm, f"{arm}/{seed}", f"{arm}/{self.log.name}")
        path = self.folder / "config.toml"
        if not path.is_file():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise ConfigError(f"--out: {self.folder} exists and is not a run.", remedy="Name another folder.")
            return
        keys = flatten(read_toml(path))
        refuse_unknown(keys, str(path))
        there = flatten(resolve(self.folder.name, keys, {}).config.model_dump(mode="json"))
        wanted = flatten(self.config.model_dump(mode="json"))
        differing = [key for key in there | wanted if wanted.get(key) != there.get(key)]
        if differing:
            what = ", ".join(f"{key} = {there.get(key)} (now {wanted.get(key)})" for key in differing)
            raise ConfigError(
                f"--out: {self.folder} was started with other settings: {what}.",
                remedy="Name another folder, or give the settings it was started with.",
            )


def split_set(text: str) -> tuple[str, str]:
    """`KEY=VALUE` is for every arm, `ARM:KEY=VALUE` for that one: (arm or empty, KEY=VALUE)."""
    arm, colon, key = text.partition("=")[0].partition(":")
    return (arm.strip(), text.partition(":")[2].strip()) if colon and key else ("", text)


def of_arm(extra: Sequence[str], arm: Arm) -> Overrides:
    """What an arm gets of it: what is for all, then its own, which wins."""
    parts = [split_set(text) for text in extra]
    return tuple(text for wanted in ("", arm.name) for name, text in parts if name == wanted)


def refuse_other_arms(extra: Sequence[str], arms: Sequence[Arm]) -> None:
    """Refuse a key for an arm that this ladder does not have."""
    for text in extra:
        name = split_set(text)[0]
        if name and name not in [arm.name for arm in arms]:
            raise ConfigError(
                f"--set {text}: no arm {name} in this ladder.",
                remedy=f"Add it to --arms, or use one of: {', '.join(arm.name for arm in arms)}.",
            )


def plan_jobs(
    recipe: str,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    budget: ArmBudget,
    extra: Sequence[str],
    out: Path,
    *,
    is_table_only: bool = False,
) -> list[Job]:
    """Every arm with every seed, seed by seed, so that an interrupted ladder has complete seeds. Raises before any run.

    With --table-only nothing is started, so runs need not be resumable.
    """
    refuse_other_arms(extra, arms)
    jobs = []
    for seed in seeds:
        for arm in arms:
            own = (*of_arm(extra, arm), *budget.overrides, f"train.seed={seed}")
            config, overrides = arm_config(recipe, arm, own)
            if config.train.steps == UNBOUNDED_STEPS and config.train.lr_decay != "none":
                raise ConfigError(
                    f"--budget {budget}: train.lr_decay = {config.train.lr_decay} decays to the last step, which "
                    "this budget does not define.",
                    remedy="Give a budget of steps, or --set train.lr_decay=none.",
                )
            if not (config.eval.every_steps and config.data.eval):
                key, value = ("data.eval", "[]") if config.eval.every_steps else ("eval.every_steps", 0)
                raise ConfigError(
                    f"{key} = {value} in {recipe}: a ladder compares evaluations, and there are none.",
                    remedy="Set eval.every_steps above 0 and name a set in data.eval.",
                )
            if not (config.checkpoint.resumable or is_table_only):
                raise ConfigError(
                    f"checkpoint.resumable = false in {recipe}: a stopped run of a ladder must be resumable.",
                    remedy="Add --set checkpoint.resumable=true.",
                )
            jobs.append(Job(arm, seed, out / arm.name / f"seed-{seed}", config, overrides))
    for job in jobs:
        job.check_settings()
    return jobs
