"""The rollouts of a step, one row per response: parquet for audits, scripts for the rollout browser."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.errors import cannot_write
from dapo.files import written_aside
from dapo.learner.batch import Batch, make_batch
from dapo.learner.ragged import Ragged
from dapo.learner.step import StepRecord
from dapo.parquet_size import FORMAT, FORMAT_KEY
from dapo.report.parts import PART_COLUMN
from dapo.report.rollouts.chunks import write_chunks
from dapo.report.rollouts.pieces import TokenPieces
from dapo.report.rollouts.recorded import DROPPED, chunk_folder, dropped_path, joined
from dapo.sampling.accounting import outcome_of
from dapo.sampling.dynamic import SampledGroups
from dapo.trainer.run import Run
from dapo.types import Completion, Group

DROPPED_PER_OUTCOME = 4  # all correct, all wrong, all equal: enough to see why, and small next to a batch


def new_record(batch: Batch) -> StepRecord:
    """Empty records for a batch; NaN marks a token no update has seen."""
    return StepRecord(Ragged(batch.lengths, torch.float32, fill=float("nan")), Ragged(batch.lengths, torch.float32))


def begin_record(run: Run, step: int, sampled: SampledGroups, batch: Batch) -> StepRecord | None:
    """An empty record for the updates to fill; None in a step whose rollouts are not recorded."""
    is_recorded = run.is_recorded(step, sampled.accounting.generated_tokens)
    return new_record(batch) if is_recorded and sampled.groups else None


def write_record(run: Run, step: int, sampled: SampledGroups, batch: Batch, record: StepRecord | None) -> None:
    """The step's responses, and some of those that were dropped, into the run's folder. The first rank writes."""
    if not run.world.is_first:
        return
    path = run.folder / "rollouts" / f"step-{step:06d}.parquet"
    dropped = make_batch(dropped_groups(sampled), run.config, run.policy.dtype)
    if problem := write_rollouts(path, step, batch, record, dropped, run.token_pieces):
        run.event("rollouts", problem)


def dropped_groups(sampled: SampledGroups) -> list[Group]:
    """A few complete groups with zero advantage: the first of each outcome, in the order they were resolved."""
    trained = {(group.problem.id, group.visit) for group in sampled.groups}
    seen: Counter[str] = Counter()
    chosen = []
    for group in sampled.resolved:
        if group.is_mixed or (group.problem.id, group.visit) in trained:
            continue
        seen[outcome_of(group)] += 1
        if seen[outcome_of(group)] <= DROPPED_PER_OUTCOME:
            chosen.append(group)
    return chosen


def write_rollouts(
    path: Path, step: int, batch: Batch, record: StepRecord | None, dropped: Batch, pieces: TokenPieces | None
) -> str | None:
    """One row per response of the step's batch at `path`, and those of dropped groups in a file of their own.

    Files are written aside and renamed, and so are the browser's scripts. Returns what went wrong with the scripts: no
    reason to stop a run, and a report makes them from the parquet.
    """
    tables = []
    if record is not None:
        tables.append(write_table(path, facts(step, batch) | updated(batch, record)))
    if dropped.lengths:
        why = {DROPPED: [outcome_of(group) for group, _ in responses_of(dropped)]}
        tables.append(write_table(dropped_path(path), facts(step, dropped) | why))
    if not tables:
        return None
    try:
        write_chunks(joined(tables), chunk_folder(path), pieces)
    except Exception as error:  # the parquet is written: the report's page is no reason to end a run
        return f"no browser scripts for step {step}: {type(error).__name__}: {error}. `dapo report` will make them."
    return None


def responses_of(batch: Batch) -> list[tuple[Group, int]]:
    """Each row of the batch as its group and its place in it."""
    G = len(batch.groups[0].completions) if batch.groups else 1
    return [(batch.groups[int(g)], row % G) for row, g in enumerate(batch.group)]


def facts(step: int, batch: Batch) -> dict[str, list[Any]]:
    """What is known of a response before any update: problem, tokens, text, verdict, rewards."""
    at = responses_of(batch)
    return {
        "step": [step] * len(at),
        "problem_id": [storable(group.problem.id) for group, _ in at],
        "question": [storable(group.problem.question) for group, _ in at],
        "answer": [storable(group.problem.answer) for group, _ in at],
        "source": [storable(group.problem.source) for group, _ in at],
        "visit": [group.visit for group, _ in at],
        "response_index": [i for _, i in at],
        "prompt_tokens": [list(group.prompt_tokens) for group, _ in at],
        "tokens": [group.completions[i].tokens for group, i in at],
        "logp": [group.completions[i].logp for group, i in at],
        "version": [group.completions[i].version for group, i in at],
        "response_text": [storable(group.completions[i].text) for group, i in at],
        "verdict": [group.judgements[i].verdict.value for group, i in at],
        "extracted": [storable(group.judgements[i].extracted) for group, i in at],
        "reward": batch.reward.tolist(),
        "reward_raw": batch.raw_reward.tolist(),
        "reward_overlong": batch.overlong_penalty.tolist(),
        **{f"{PART_COLUMN}{name}": known(values) for name, values in batch.parts.items()},
        "stop_reason": [group.completions[i].stop_reason.value for group, i in at],
        **({"own": [own_of(group.completions[i]) for group, i in at]} if any(m is not None for m in batch.own) else {}),
    }


def own_of(completion: Completion) -> NDArray[np.bool_]:
    """Which tokens the model drew."""
    return np.ones(len(completion.tokens), np.bool_) if completion.own is None else completion.own


def known(values: Tensor) -> list[float | None]:
    """NaN, for a part of the reward that could not be measured, is no value."""
    return [None if value != value else value for value in values.tolist()]


def updated(batch: Batch, record: StepRecord) -> dict[str, list[Any]]:
    """What the updates computed for each token."""
    rows = range(len(batch.lengths))

    def per_token(values: Ragged, fill: float = float("nan")) -> list[NDArray[np.float32]]:
        return [among_all(values.row(row).float().numpy(), batch.own[row], fill) for row in rows]

    return {
        "logp_old": per_token(batch.logp_old),
        "entropy": per_token(batch.entropy),
        "advantage": per_token(batch.advantage),
        "ratio": per_token(record.ratio),
        "clip": [clip.astype(np.int8) for clip in per_token(record.clip, 0.0)],
    }


def among_all(values: NDArray[np.float32], own: NDArray[np.bool_] | None, fill: float) -> NDArray[np.float32]:
    """The values of the model's own tokens, each in its place among all tokens of the row."""
    if own is None:
        return values
    everywhere = np.full(len(own), fill, np.float32)
    everywhere[own] = values
    return everywhere


def storable(text: str | None) -> str | None:
    """Replace lone surrogates, which JSON may hold and UTF-8 cannot, by question marks."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def write_table(path: Path, columns: dict[str, list[Any]]) -> pa.Table:
    table = pa.table(columns, metadata={FORMAT_KEY: str(FORMAT)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            pq.write_table(table, aside, compression="zstd")
    except OSError as error:
        raise cannot_write(path, error) from None
    return table


def token_pieces(tokenizer: Any) -> TokenPieces | None:
    """What each token of the policy's tokenizer writes; None for one that is not a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else TokenPieces(backend)
