"""A first recipe from a few answers: every line with its reason, as TOML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo.config.model_shapes import BUNDLED, ModelShape
from dapo.planning.fit import Choice

GOALS = {"try": "20 short steps: does it learn at all?", "score": "200 steps: as good as it gets"}

TEMPLATE = ("dapo", "the words around a question: they ask for a last line 'Answer: …'")
RAW = ("raw", "no words around the question: the toy model reads nothing else")


@dataclass(frozen=True, slots=True)
class Answers:
    """What is known before the first run."""

    model: str
    shape: ModelShape | None
    train: str
    eval: tuple[str, ...]
    fields: dict[str, str]
    verifier: str
    goal: str  # of GOALS
    n_problems: int
    prompt_tokens: int  # the longest prompts that are used
    context: int | None  # of the model, in tokens
    has_chat_template: bool
    on_cpu: bool = False
    is_adapter: bool = False
    responses_per_prompt: int = 8
    why_responses: str = "G: completions per problem, compared with each other"


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the recipe."""

    key: str
    value: Any
    why: str


def settings_of(a: Answers) -> list[Setting]:
    """The recipe's lines, section by section."""
    is_try, is_toy = a.goal == "try", a.model == BUNDLED
    prompts = min(16 if is_try else 64, a.n_problems)
    response = response_tokens(a)
    made = [
        Setting("preset", "dapo", "the algorithm; `dapo explain FILE grpo` shows how another one differs"),
        Setting("model.path", a.model, "a folder, a name on the hub, or the bundled toy model"),
        Setting("data.train", a.train, f"{a.n_problems:,} problems"),
        Setting("data.eval", list(a.eval), "problems that are never trained on: the score to look at"),
        Setting("data.fields", a.fields, "which column is what"),
        Setting("data.template", *(RAW if is_toy else TEMPLATE)),
        Setting("data.chat_template", a.has_chat_template, "an instruct model has one, a base model mostly not"),
        Setting("rewards.verifier", a.verifier, "what counts as correct"),
        Setting("limits.max_prompt_tokens", a.prompt_tokens, "longer prompts are dropped, never truncated"),
        Setting("limits.max_response_tokens", response, "longer responses are truncated, and count as wrong"),
        Setting("shaping.overlong_buffer_tokens", response // 4, "the length penalty grows over the last of them"),
        Setting("sampling.prompts_per_step", prompts, "problems that one step trains on"),
        Setting("sampling.responses_per_prompt", a.responses_per_prompt, a.why_responses),
        Setting("train.steps", 20 if is_try else 200, GOALS[a.goal]),
        Setting("train.lr", learning_rate(a), f"usual for {size_in_words(a)}; halve it if entropy collapses"),
        Setting("train.warmup_steps", 3 if is_try else 10, "steps until the full learning rate"),
        Setting("train.updates_per_step", min(4, prompts), "optimizer updates that a step's problems are split into"),
        Setting("eval.every_steps", 10 if is_try else 20, "evaluations, also one before the first step"),
        Setting("eval.k", 4, "responses per evaluation problem: avg@k, pass@k"),
        Setting("checkpoint.every_steps", 10, "what a stopped run resumes from"),
    ]
    if a.on_cpu:
        made.append(Setting("model.device", "cpu", "no GPU was named"))
    left_out = {"data.fields": not a.fields, "data.eval": not a.eval}
    left_out |= dict.fromkeys(("eval.every_steps", "eval.k"), not a.eval)
    return [one for one in made if not left_out.get(one.key)]


def response_tokens(a: Answers) -> int:
    """By the goal, as far as the model's context reaches."""
    wanted = 64 if a.model == BUNDLED else 512 if a.goal == "try" else 1024
    return wanted if a.context is None else max(16, min(wanted, a.context - a.prompt_tokens))


def learning_rate(a: Answers) -> float:
    """What recipes of this size have; an adapter takes more."""
    n = a.shape.parameters if a.shape is not None else None
    if n is None:
        return 1e-5 if a.is_adapter else 1e-6
    if n < 1e7:
        return 5e-4
    if a.is_adapter:
        return 2e-5 if n < 1e9 else 1e-5
    return 2e-5 if n < 3e8 else 6e-6 if n < 3e9 else 1e-6


def size_in_words(a: Answers) -> str:
    if a.shape is None:
        return "a model whose size is not known here"
    n = a.shape.parameters
    kind = "an adapter on " if a.is_adapter else ""
    return f"{kind}a model of {n / 1e9:.1f} B" if n >= 1e8 else f"{kind}a model of {n / 1e6:.3g} M"


def with_choices(settings: Sequence[Setting], choices: Sequence[Choice]) -> list[Setting]:
    """The recipe with what `--fit` chose."""
    chosen = {one.key: Setting(one.key, one.value, one.why) for one in choices}
    kept = [chosen.pop(one.key, one) for one in settings]
    return [*kept, *chosen.values()]


def toml_of(settings: Sequence[Setting], title: str) -> str:
    """As TOML: a section after the other, comments aligned within a section."""
    sections: dict[str, list[Setting]] = {}
    for one in settings:
        section, _, name = one.key.rpartition(".")
        sections.setdefault(section, []).append(replace(one, key=name))
    blocks = [f"# {title}"]
    for section, lines in sections.items():
        pairs = [f"{one.key} = {value_of(one.value)}" for one in lines]
        width = min(60, max(len(pair) for pair in pairs))
        said = [f"{pair:<{width}}  # {one.why}" for pair, one in zip(pairs, lines, strict=True)]
        blocks.append("\n".join([f"[{section}]"] * bool(section) + said))
    return "\n\n".join(blocks) + "\n"


def value_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {value_of(inner)}" for key, inner in value.items()) + " }"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
