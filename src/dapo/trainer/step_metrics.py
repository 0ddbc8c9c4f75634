"""The metrics of a step's sampling: accuracy, rewards, lengths, groups kept, tokens spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dapo.config.schema import Config
from dapo.learner.batch import Batch
from dapo.sampling.accounting import CAUSES, n_tokens
from dapo.sampling.carry import oldest_version
from dapo.sampling.dynamic import SampledGroups
from dapo.sampling.predictive import Posteriors
from dapo.types import CORRECT, Verdict


def step_metrics(step: int, sampled: SampledGroups, batch: Batch, version: int) -> dict[str, float]:
    """Accuracy, rewards, lengths, acceptance and where the tokens went; verdict shares are of the trained groups."""
    accounting = sampled.accounting
    metrics: dict[str, float] = {
        "step": step,
        "accuracy": accounting.accuracy,
        "sampling/prompts_tried": accounting.prompts_tried,
        "sampling/groups_kept": accounting.acceptance,
        "sampling/groups_trained": accounting.groups_trained,
        "sampling/groups_all_correct": accounting.groups_all_correct,
        "sampling/groups_all_wrong": accounting.groups_all_wrong,
        "sampling/mixed_per_1000_tokens": accounting.mixed_per_1000_tokens,
        "tokens/generated": accounting.generated_tokens,
        "tokens/trained": accounting.trained_tokens,
        "sampling/staleness_max": max((version - oldest_version(group) for group in batch.groups), default=0),
    }
    wasted = accounting.wasted_tokens
    metrics |= {f"tokens/wasted_{cause}": wasted[cause] for cause in CAUSES if cause != "all_equal" or wasted[cause]}
    metrics |= overtaken_metrics(sampled)
    if accounting.groups_all_equal:  # graded rewards only
        metrics["sampling/groups_all_equal"] = accounting.groups_all_equal
    if accounting.responses_judged:
        metrics["length/truncated"] = accounting.responses_truncated / accounting.responses_judged
    return metrics | batch_metrics(batch)


def overtaken_metrics(sampled: SampledGroups) -> dict[str, float]:
    """Whether short groups are trained on before long ones; {} where no step leaves a group behind."""
    accounting = sampled.accounting
    if not (accounting.groups_overtaken or accounting.overtaken_responses):
        return {}
    metrics: dict[str, float] = {
        "sampling/groups_overtaken": accounting.groups_overtaken,
        "sampling/groups_stale": accounting.groups_stale,
    }
    n_kept = sum(len(group.completions) for group in sampled.groups)
    if n_kept:
        metrics["sampling/length_kept"] = sum(map(n_tokens, sampled.groups)) / n_kept
    if accounting.overtaken_responses:
        metrics["sampling/length_overtaken"] = accounting.overtaken_tokens / accounting.overtaken_responses
    if n_kept and accounting.overtaken_tokens:
        metrics["sampling/length_ratio"] = metrics["sampling/length_kept"] / metrics["sampling/length_overtaken"]
    return metrics


def selection_metrics(
    config: Config, posteriors: Posteriors, sources: Sequence[str], sampled: SampledGroups
) -> dict[str, float]:
    """How many problems are retired, and of a mixture each source on its own."""
    above = config.sampling.retire_above
    metrics: dict[str, float] = {}
    if above is not None:
        metrics["sampling/retired"] = sum(posteriors.is_solved(problem, above) for problem in posteriors.counts)
    for name in sources:
        own = source_metrics(sampled, name)
        if config.keeps_posteriors:
            own |= posterior_metrics(posteriors, name, above)
        metrics |= {metric.replace("NAME", name, 1): value for metric, value in own.items()}
    return metrics


def source_metrics(sampled: SampledGroups, name: str) -> dict[str, float]:
    """Of one source. What it cannot be known for, for want of a group in this step, is left out."""
    tried = sum(problem.source == name for problem in sampled.submitted)
    metrics: dict[str, float] = {"source/NAME/prompts_tried": tried}
    if sampled.submitted:
        metrics["source/NAME/share_submitted"] = tried / len(sampled.submitted)
    if sampled.groups:
        trained = sum(group.problem.source == name for group in sampled.groups)
        metrics["source/NAME/share_kept"] = trained / len(sampled.groups)
    groups = [group for group in sampled.resolved if group.problem.source == name]
    if not groups:
        return metrics
    n_responses = sum(len(group.completions) for group in groups)
    tokens = sum(map(n_tokens, groups))
    metrics["source/NAME/accuracy"] = sum(group.n_correct for group in groups) / n_responses
    metrics["source/NAME/groups_kept"] = sum(group.is_mixed for group in groups) / len(groups)
    metrics["source/NAME/length"] = tokens / n_responses
    if tokens:
        idle = sum(n_tokens(group) for group in groups if not group.is_mixed)
        metrics["source/NAME/waste"] = idle / tokens
    return metrics


def posterior_metrics(posteriors: Posteriors, name: str, above: float | None) -> dict[str, float]:
    visited = [problem for problem in posteriors.counts if problem.startswith(f"{name}/")]
    metrics: dict[str, float] = {}
    if visited:
        metrics["source/NAME/pass_rate"] = sum(map(posteriors.pass_rate, visited)) / len(visited)
    if above is not None:
        metrics["source/NAME/retired"] = sum(posteriors.is_solved(problem, above) for problem in visited)
    return metrics


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, verdicts and lengths of the rows the step trains on."""
    if not batch.lengths:
        return {}
    length = np.array(batch.lengths)
    right = batch.is_correct.numpy()
    verdicts = Counter(judgement.verdict for group in batch.groups for judgement in group.judgements)
    metrics = {
        "reward/mean": float(batch.reward.mean()),
        "reward/raw": float(batch.raw_reward.mean()),
        "reward/overlong": float(batch.overlong_penalty.mean()),
        "length/mean": float(length.mean()),
        "length/p10": float(np.quantile(length, 0.1)),
        "length/p90": float(np.quantile(length, 0.9)),
        "length/max": float(length.max()),
    }
    if right.any():
        metrics["length/correct"] = float(length[right].mean())
    if not right.all():
        metrics["length/wrong"] = float(length[~right].mean())
    for verdict in (Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.TIMEOUT, Verdict.CRASH):
        metrics[f"verdict/{verdict.value.lower()}"] = verdicts[verdict] / len(batch.lengths)
    return metrics | episode_metrics(batch) | part_metrics(batch)


def episode_metrics(batch: Batch) -> dict[str, float]:
    """Of episodes of several turns; {} without any."""
    episodes = [c.episode for group in batch.groups for c in group.completions if c.episode is not None]
    if not episodes:
        return {}
    calls = sum(episode.calls for episode in episodes)
    metrics = {
        "episode/turns": sum(episode.turns for episode in episodes) / len(episodes),
        "episode/tool_calls": calls / len(episodes),
    }
    if calls:
        metrics["episode/tool_failures"] = sum(episode.failures for episode in episodes) / calls
    return metrics


def part_metrics(batch: Batch) -> dict[str, float]:
    """Of each part of the reward, before its weight: mean, std, share of the advantages' variance; {} without parts."""
    metrics: dict[str, float] = {}
    for name, value in {CORRECT: batch.raw_reward, **batch.parts}.items() if batch.parts else ():
        known = value[~value.isnan()]
        metrics[f"reward/part/{name}/unknown"] = 1 - len(known) / len(value)
        if len(known):
            metrics[f"reward/part/{name}/mean"] = float(known.mean())
            metrics[f"reward/part/{name}/std"] = float(known.std(correction=0))
    return metrics | {f"reward/part/{name}/share": share for name, share in batch.part_shares.items()}
