"""The model card: base model, data, settings, scores, and what is not known."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo import __version__
from dapo.commands import visible
from dapo.config.load import flatten, read_preset
from dapo.config.schema import Config
from dapo.config.sources import train_in_words
from dapo.release.base_model import BaseModel, base_model_of

PLAIN = re.compile(r"[\w./@:+-]+( [\w./@:+-]+)*")
QUANTIZED = {
    "int8": "8 bits (int8, a scale per block of 64)",
    "nf4": "4 bits (NF4, a fitted scale per block of 32)",
}
# The settings that the card shows; the run's config.toml has them all.
KEY_SETTINGS = (
    "algorithm.advantage",
    "algorithm.loss_aggregation",
    "algorithm.clip.low",
    "algorithm.clip.high",
    "algorithm.kl.coefficient",
    "algorithm.kl.place",
    "algorithm.kl.path",
    "shaping.overlong_filter",
    "shaping.overlong_penalty",
    "sampling.dynamic",
    "sampling.prompts_per_step",
    "sampling.responses_per_prompt",
    "sampling.temperature",
    "limits.max_prompt_tokens",
    "limits.max_response_tokens",
    "data.template",
    "data.chat_template",
    "rewards.verifier",
    "train.lr",
    "train.warmup_steps",
    "train.lr_decay",
    "train.updates_per_step",
    "train.seed",
    "model.lora.rank",
    "model.lora.quantization",
)


def model_card(
    name: str,
    config: Config,
    step: int,
    state: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    is_adapter: bool = False,
) -> str:
    """README.md of an exported model, or of its adapter alone. Evaluations of later steps are not this model's."""
    base = base_model_of(config.model.path, config.model.revision)
    known = [line for line in evaluations if int(line["step"]) <= step]
    parts = [
        front_matter(base, library="peft" if is_adapter else "transformers"),
        f"# {name}",
        origin(base, config, step, state) + adapter(config, is_alone=is_adapter),
        *(warning for warning in (changes(config), deviations(config)) if warning),
        f"Base model: {base.in_words}.\n\nLicence of the base model: {base.licence_in_words}.",
    ]
    parts += ["## Scores", scores(known, step)]
    parts += ["## Data", data(config, state, known)]
    parts += ["## Settings", settings(config)]
    return "\n\n".join(parts) + "\n"


def front_matter(base: BaseModel, *, library: str) -> str:
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags: [dapo, reinforcement-learning]"]
    if base.hub_name:
        lines.append(f"base_model: {yaml(base.hub_name)}")
    own_terms = ["license: other", f"license_name: {yaml(base.licence)}"]
    lines += own_terms if base.has_own_terms else [f"license: {yaml(base.licence or 'unknown')}"]
    return "\n".join(["---", *lines, "---"])


def yaml(text: str) -> str:
    return text if PLAIN.fullmatch(text) and ": " not in text else json.dumps(text)


def origin(base: BaseModel, config: Config, step: int, state: Mapping[str, Any]) -> str:
    skipped = f" ({state['bad_updates']} skipped in a row at the end)" if state.get("bad_updates") else ""
    planned = f" of the {config.train.steps:,} planned" if step != config.train.steps else ""
    return (
        f"`{inert(base.path)}` trained by reinforcement learning with the preset `{config.preset}` of dapo "
        f"{__version__}: {step:,} steps{planned}, {state['updates']:,} updates{skipped}."
    )


def adapter(config: Config, *, is_alone: bool) -> str:
    """What a LoRA adapter was trained on, and whether it is in the weights or all there is."""
    rank = config.model.lora.rank
    if not rank:
        return ""
    said = f" A LoRA adapter of rank {rank} was trained"
    kind = config.base_quantization
    said += f", over weights in {QUANTIZED[kind]}," if kind else ""
    if not is_alone:
        return f"{said} and is merged into the weights" + (", as those bits have them." if kind else ".")
    said += " and is what this folder holds: load it with peft, over the base model"
    close = "over 16 bits it is another model, close to the trained one."
    return f"{said}; {close} Export without `--adapter` writes the one that was trained." if kind else f"{said}."


def changes(config: Config) -> str:
    """Where the run's algorithm differs from its preset."""
    keys = flatten(config.model_dump(mode="json"))
    changed = [
        f"`{key}` = {shown(keys[key])} (preset: {shown(value)})"
        for key, value in flatten(read_preset(config.preset)).items()
        if none_as_word(keys[key]) != none_as_word(value)
    ]
    return f"**Changed from the preset**: {', '.join(changed)}." if changed else ""


def none_as_word(value: object) -> object:
    """TOML has no null: a preset writes "none", which is a word of some keys and the absence of a value of others."""
    return "none" if value is None else value


def deviations(config: Config) -> str:
    if config.is_paper_algorithm:
        return ""
    parts = []
    if switches := switches_on(config):
        parts.append(f"{', '.join(switches)}. Tokens may come from older weights, or problems are not drawn uniformly.")
    if config.rewards.control != "none":
        parts.append(
            f"a control experiment, `rewards.control` = {config.rewards.control}: not meant to learn the task."
        )
    return f"**Not the paper's algorithm**: {' And '.join(parts)}"


def switches_on(config: Config) -> list[str]:
    names = ("carry_over", "partial_rollouts", "predictive", "retire_above")
    return [f"`sampling.{name}`" for name in names if getattr(config.sampling, name)]


def scores(lines: Sequence[Mapping[str, Any]], step: int) -> str:
    """Before and after, each set and score, with 95 % intervals, and which step's model each is of."""
    if not lines:
        return "The run was not evaluated."
    rows = ["| set | problems | score | before | after | after step |", "|---|---|---|---|---|---|"]
    is_older = False
    for name in dict.fromkeys(line["set"] for line in lines):
        own = [line for line in lines if line["set"] == name]
        first = own[0] if int(own[0]["step"]) == 0 else None
        last = own[-1] if int(own[-1]["step"]) > 0 else None
        newest = own[-1]
        is_older |= int(newest["step"]) < step
        for score in ("avg@k", "pass@k", "maj@k"):
            cells = [
                literal(name),
                f"{newest.get('problems') or 0:,}",
                score.replace("k", str(newest["k"])),
                with_interval(first, score, k=newest["k"]),
                with_interval(last, score, k=newest["k"]),
                f"{int(last['step']):,}" if last else "none",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    note = "In brackets: 95 % bootstrap intervals over problems. Before: the base model."
    if is_older:
        note += f" This model is that of step {step:,}; scores of an earlier step, or of none, are not its own."
    return "\n".join([*rows, "", note])


def with_interval(line: Mapping[str, Any] | None, score: str, *, k: int) -> str:
    if line is None:
        return "not measured"
    if line[score] is None:  # maj@k of a verifier that extracts no answer
        return "n/a"
    low, high = line[f"{score}_interval"]
    other = f" (k = {line['k']})" if line["k"] != k else ""
    return f"{line[score]:.3f} [{low:.3f}, {high:.3f}]{other}"


def data(config: Config, state: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    n_problems = state["sampling"]["order"]["n_problems"]
    parts = [
        f"Trained on `{inert(train_in_words(config))}`: {n_problems:,} problems, "
        f"SHA-256 of their ids, questions and answers `{state['data']}`."
    ]
    if sets := dict.fromkeys(line["set"] for line in lines):
        parts.append(f"Evaluated on {', '.join(f'`{inert(name)}`' for name in sets)}.")
    return " ".join(parts)


def settings(config: Config) -> str:
    keys = flatten(config.model_dump(mode="json"))
    rows = [f"| `{key}` | {shown(keys[key])} |" for key in KEY_SETTINGS]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else literal(str(value))


def literal(text: str) -> str:
    """Untrusted text in Markdown: plain where it is a name, otherwise as code that it cannot close."""
    return text if PLAIN.fullmatch(text) else f"`{inert(text)}`"


def inert(text: str) -> str:
    """Untrusted text made safe between backquotes, also in a table cell."""
    return visible(" ".join(text.split())).replace("`", "'").replace("|", "\\|")
