"""What the model wrote in a step, one row per response: parquet for audits, scripts for the rollout browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dapo.errors import cannot_write
from dapo.report.chunks import chunk_folder, write_chunks
from dapo.report.pieces import TokenPieces
from dapo.tracking.files import sync
from dapo.trainer.batch import Batch
from dapo.trainer.ragged import Ragged
from dapo.trainer.update import StepRecord


def new_record(batch: Batch) -> StepRecord:
    """Empty records for a batch; NaN marks a token no update has seen."""
    return StepRecord(Ragged(batch.lengths, torch.float32, fill=float("nan")), Ragged(batch.lengths, torch.float32))


def write_rollouts(path: Path, step: int, batch: Batch, record: StepRecord, pieces: TokenPieces | None) -> str | None:
    """One row per response of the step's batch; written aside and renamed, and so are the browser's scripts.

    Returns what went wrong with the scripts: no reason to stop a run, and a report makes them from the parquet.
    """
    rows = range(len(batch.lengths))
    of = [(batch.groups[int(g)], row) for row, g in enumerate(batch.group)]
    G = len(batch.groups[0].completions) if batch.groups else 1
    at = [(group, row % G) for group, row in of]
    columns = {
        "step": [step] * len(of),
        "problem_id": [group.problem.id for group, _ in at],
        "question": [group.problem.question for group, _ in at],
        "answer": [group.problem.answer for group, _ in at],
        "source": [group.problem.source for group, _ in at],
        "visit": [group.visit for group, _ in at],
        "response_index": [i for _, i in at],
        "prompt_tokens": [list(group.prompt_tokens) for group, _ in at],
        "tokens": [group.completions[i].tokens for group, i in at],
        "logp": [group.completions[i].logp for group, i in at],
        "logp_old": [batch.logp_old.row(row).float().numpy() for row in rows],
        "entropy": [batch.entropy.row(row).float().numpy() for row in rows],
        "advantage": [batch.advantage.row(row).float().numpy() for row in rows],
        "ratio": [record.ratio.row(row).numpy() for row in rows],
        "clip": [record.clip.row(row).to(torch.int8).numpy() for row in rows],
        "version": [group.completions[i].version for group, i in at],
        "response_text": [group.completions[i].text for group, i in at],
        "verdict": [group.judgements[i].verdict.value for group, i in at],
        "extracted": [group.judgements[i].extracted for group, i in at],
        "reward": batch.reward.tolist(),
        "reward_raw": batch.raw_reward.tolist(),
        "reward_overlong": batch.overlong_penalty.tolist(),
        "stop_reason": [group.completions[i].stop_reason.value for group, i in at],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    table = pa.table(columns)
    try:
        pq.write_table(table, aside, compression="zstd")
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from None
    try:
        write_chunks(table, chunk_folder(path), pieces)
    except Exception as error:
        return f"no browser scripts for step {step}: {type(error).__name__}: {error}. `dapo report` will make them."
    return None


def token_pieces(tokenizer: Any) -> TokenPieces | None:
    """What each token of the policy's tokenizer writes; None for one that is not a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else TokenPieces(backend)
