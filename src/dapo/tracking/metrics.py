"""Every metric of a step: name, unit, meaning. An undeclared name is an error; the glossary is made from this."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

OF_A_SOURCE = re.compile(r"^source/[\w-]+/")

METRICS: dict[str, tuple[str, str]] = {
    "step": ("", "training step, counted from 1"),
    "updates": ("", "optimizer updates of this step"),
    "updates_total": ("", "optimizer updates since the start of the run"),
    "lr": ("", "learning rate of this step"),
    "accuracy": ("", "fraction of correct responses among all that were verified, groups not mixed included"),
    "reward/mean": ("", "mean reward of the trained responses, shaping included"),
    "reward/raw": ("", "mean raw reward of the trained responses, ±1 for rule-based verifiers"),
    "reward/overlong": ("", "mean soft overlong penalty of the trained responses"),
    "reward/part/NAME/mean": (
        "",
        "mean of a part of the reward before its weight, where it is known; NAME is the part",
    ),
    "reward/part/NAME/std": ("", "standard deviation of a part of the reward over the trained responses"),
    "reward/part/NAME/share": ("", "share of the advantages' variance that is due to the part; all parts sum to 1"),
    "reward/part/NAME/unknown": ("", "share of trained responses for which the part could not be measured"),
    "verdict/wrong": ("", "fraction of trained responses that are WRONG"),
    "verdict/unparseable": ("", "fraction of trained responses without a readable answer"),
    "verdict/timeout": ("", "fraction of trained responses whose verification timed out"),
    "verdict/crash": ("", "fraction of trained responses that crashed the verifier"),
    "length/mean": ("tokens", "mean length of the trained responses"),
    "length/p10": ("tokens", "10th percentile of the response length"),
    "length/p90": ("tokens", "90th percentile of the response length"),
    "length/max": ("tokens", "longest trained response"),
    "length/correct": ("tokens", "mean length of correct trained responses"),
    "length/wrong": ("tokens", "mean length of wrong trained responses"),
    "length/truncated": ("", "fraction of verified responses that ran into the length limit"),
    "episode/turns": ("", "mean number of the model's turns in a trained episode"),
    "episode/tool_calls": ("", "mean number of tool calls in a trained episode"),
    "episode/tool_failures": ("", "fraction of the tool calls of trained episodes that failed"),
    "policy/loss": ("", "policy loss, mean over the updates that were not skipped"),
    "policy/entropy": ("nats", "mean entropy of the next-token distribution on trained tokens"),
    "policy/probability": ("", "mean probability of the trained tokens"),
    "policy/kl_old": ("nats", "mean log π_old − log π_θ over the step's updates"),
    "policy/kl_ref": ("nats", "mean KL to the reference or teacher"),
    "policy/positive_nll": ("nats", "negative log-likelihood of correct responses"),
    "policy/grad_norm": ("", "gradient norm before clipping, mean over the updates that were not skipped"),
    "policy/skipped_updates": ("", "updates skipped for a non-finite gradient, of policy and critic together"),
    "update/loss_scale": ("", "float16: factor of the policy's loss in the backward pass, after the step"),
    "update/critic_loss_scale": ("", "float16: factor of the critic's loss in the backward pass, after the step"),
    "update/scale_skips": ("", "float16: updates skipped to find a loss scale, of policy and critic together"),
    "clip/low": ("", "fraction of tokens with a negative advantage clipped at 1 − ε_low"),
    "clip/high": ("", "fraction of tokens with a positive advantage clipped at 1 + ε_high"),
    "clip/dual": ("", "fraction of tokens bounded by the dual clip"),
    "clip/high_probability_mean": ("", "mean probability of the tokens clipped high (DAPO Fig. 3)"),
    "clip/high_probability_max": ("", "largest probability of a token clipped high (DAPO Fig. 3: below 0.2)"),
    "engine/faults": ("", "responses the engine gave up because their logits were not finite"),
    "engine/drafted": ("tokens", "drafts: tokens that the engine guessed in this step"),
    "engine/accepted": ("tokens", "drafts: tokens of them that were drawn; each saved a pass over its response"),
    "engine/gap_mean": ("nats", "mean |log π_trainer − log π_engine| of the sampled tokens"),
    "engine/gap_max": ("nats", "largest |log π_trainer − log π_engine|"),
    "engine/kl": ("nats", "KL(engine ‖ trainer), k3"),
    "engine/effective_sample_size": ("", "fraction of tokens in effect under the importance weights"),
    "engine/masked": ("", "fraction of tokens that a masked correction leaves out"),
    "critic/loss": ("", "value loss, mean over the updates that were not skipped"),
    "critic/explained_variance": ("", "1 − Var(return − value)/Var(return), of the returns with λ = 1"),
    "critic/grad_norm": ("", "gradient norm of the critic before clipping"),
    "sampling/prompts_tried": ("", "prompts submitted up to the last group used"),
    "sampling/groups_kept": ("", "fraction of resolved groups that are mixed"),
    "sampling/groups_trained": ("", "groups the step trained on"),
    "sampling/groups_all_correct": ("", "groups dropped because every response was correct"),
    "sampling/groups_all_wrong": ("", "groups dropped because every response was wrong"),
    "sampling/groups_all_equal": ("", "graded rewards: groups dropped because every response had the same value"),
    "sampling/mixed_per_1000_tokens": ("", "mixed groups per 1,000 generated tokens"),
    "sampling/groups_overtaken": ("", "partial rollouts: groups that the step left unfinished"),
    "sampling/groups_stale": ("", "groups dropped because a token was too old"),
    "sampling/length_kept": ("tokens", "partial rollouts: mean response length of the groups trained on"),
    "sampling/length_overtaken": (
        "tokens",
        "mean response length of groups that an earlier step left unfinished: complete and mixed now, or dropped",
    ),
    "sampling/length_ratio": (
        "",
        "length_kept / length_overtaken; the further below 1, the more short groups go first",
    ),
    "sampling/staleness_max": ("updates", "age of the oldest trained token"),
    "tokens/generated": ("tokens", "all tokens generated for this step"),
    "tokens/trained": ("tokens", "tokens that entered the loss"),
    "tokens/wasted_all_correct": ("tokens", "tokens of groups that were all correct"),
    "tokens/wasted_all_wrong": ("tokens", "tokens of groups that were all wrong"),
    "tokens/wasted_all_equal": ("tokens", "graded rewards: tokens of groups whose values were all the same"),
    "tokens/wasted_surplus": ("tokens", "tokens of finished responses that no step needed"),
    "tokens/wasted_aborted": ("tokens", "tokens of responses aborted as surplus, or given up by the engine"),
    "tokens/wasted_truncated": ("tokens", "tokens of truncated responses taken out of the loss"),
    "tokens/wasted_stale": ("tokens", "tokens of groups that grew too old"),
    "sampling/retired": ("", "problems retired after this step: their pass rate is at or above sampling.retire_above"),
    "source/NAME/prompts_tried": ("", "of a mixture: prompts of this source submitted up to the last group used"),
    "source/NAME/share_submitted": (
        "",
        "its share of the prompts submitted; in the long run, of the weights",
    ),
    "source/NAME/share_kept": ("", "its share of the groups the step trained on"),
    "source/NAME/accuracy": ("", "share of correct responses among all of this source that were verified"),
    "source/NAME/groups_kept": ("", "share of its resolved groups that are mixed"),
    "source/NAME/length": ("tokens", "mean length of its verified responses"),
    "source/NAME/waste": ("", "share of its verified responses' tokens that are in groups that are not mixed"),
    "source/NAME/pass_rate": (
        "",
        "mean posterior pass rate of its problems seen; with predictive or retire_above",
    ),
    "source/NAME/retired": ("", "its problems retired after this step"),
    "timing.rollout_s": ("s", "time to sample the step's groups: generation and verdicts"),
    "timing.tail_s": (
        "s",
        "time of the rollout with at most an eighth of the most responses that ran together: the last, longest ones",
    ),
    "timing.verdicts_s": ("s", "time of the rollout spent only waiting for verdicts"),
    "timing.environments_s": ("s", "time of the rollout spent only waiting for environments: no sequence could decode"),
    "timing.old_logp_s": ("s", "time of the π_old pass"),
    "timing.update_s": ("s", "time of the updates"),
    "timing.evaluation_s": ("s", "time of evaluation, in eval.jsonl"),
    "timing.step_s": ("s", "time of the whole step"),
    "timing.tokens_per_s": ("tokens/s", "generated tokens per second of the step"),
}


def finite(line: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a line that are numbers: NaN and infinity are no JSON, and no reader could draw them."""
    return {name: value for name, value in line.items() if math.isfinite(value)}


PART_PREFIX = "reward/part/"
PART_METRICS = ("mean", "std", "share", "unknown")


def declared(name: str) -> str:
    """The name under which a metric is declared: a part of the reward and a source of a mixture are NAME there."""
    if name.startswith(PART_PREFIX):
        return f"{PART_PREFIX}NAME/{name.rpartition('/')[2]}"
    return OF_A_SOURCE.sub(r"source/NAME/", name)


def part_names(names: Iterable[str]) -> list[str]:
    """The parts of the reward that have metrics, in their order."""
    own = (name.removeprefix(PART_PREFIX).partition("/")[0] for name in names if name.startswith(PART_PREFIX))
    return list(dict.fromkeys(own))


def check_declared(metrics: Mapping[str, object]) -> None:
    undeclared = {declared(name) for name in metrics} - METRICS.keys()
    assert not undeclared, f"metrics without a declaration in tracking/metrics.py: {sorted(undeclared)}"
