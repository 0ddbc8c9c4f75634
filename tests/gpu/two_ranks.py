"""A program for one card: the same run by one rank, by two ranks that share it, and by two that share it sharded.

    python tests/gpu/two_ranks.py FOLDER --set model.path=… --set data.train=… [--steps 10] [--recipe RECIPE]

Each runs `gsm8k-coder-0.5b-ladder` in float32 for ten steps. Prints one JSON object: of each pair of runs the steps up
to which the ledgers (which groups, and what became of them) and the recorded tokens are the same, the largest
difference of any weight, accuracies, evaluations and seconds per step. Tokens can be the same where products do not
depend on the number of rows, as those of the bundled model (`--recipe quickstart`) did not; for a score of a larger one
take --set model.dtype=bfloat16, which is much faster, and an evaluation. Two ranks on one card prove streams, memory
and copies on CUDA; they prove nothing about NCCL, about several cards or about speed: all collectives go through the
host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

LAYOUTS = {
    "one": (1, []),
    "replicated": (2, ["cluster.shard=none"]),
    "sharded": (2, ["cluster.shard=full"]),
}
KEYS = [
    "model.dtype=float32", "eval.every_steps=0", "data.eval=[]", "records.every_steps=1", "checkpoint.every_steps=0",
    "train.lr_decay=none",
]  # fmt: skip


def command(recipe: str, folder: Path, n_ranks: int, keys: list[str]) -> list[str]:
    """`dapo train`, or torchrun's of it with so many ranks on one card."""
    cluster = ["cluster.backend=torchrun", f"cluster.ranks_per_gpu={n_ranks}"] if n_ranks > 1 else []
    sets = [word for key in [*keys, *cluster] for word in ("--set", key)]
    start = [sys.executable, "-m"]
    if n_ranks > 1:
        start += ["torch.distributed.run", "--nproc-per-node", str(n_ranks), "-m"]
    return [*start, "dapo", "train", recipe, *sets, "--out", str(folder)]


def compared(one: Path, other: Path) -> dict[str, Any]:
    """How far two runs are the same."""
    return {
        "same_groups_up_to_step": n_same(lines_of(one, "ledger.jsonl"), lines_of(other, "ledger.jsonl")),
        "same_tokens_up_to_step": n_same(tokens_of(one), tokens_of(other)),
        "largest_weight_difference": largest_difference(one, other),
        "accuracy": [[line["accuracy"] for line in lines_of(run, "metrics.jsonl")] for run in (one, other)],
        "evaluations": [evaluations(run) for run in (one, other)],
        "seconds_per_step": [
            [line["timing.step_s"] for line in lines_of(run, "metrics.jsonl")] for run in (one, other)
        ],
    }


def evaluations(run: Path) -> list[float]:
    return [line["avg@k"] for line in lines_of(run, "eval.jsonl")] if (run / "eval.jsonl").exists() else []


def n_same(ours: list[Any], theirs: list[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def tokens_of(run: Path) -> list[Any]:
    """Of every recorded step: problem, visit and tokens of each response."""
    import pyarrow.parquet as pq

    columns = ["problem_id", "visit", "response_index", "tokens"]
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    return [pq.read_table(path, columns=columns).to_pylist() for path in files]


def largest_difference(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    ours, theirs = (
        {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for newest in (sorted((run / "checkpoints").glob("step-*"))[-1] / "model" for run in (one, other))
    )
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="gsm8k-coder-0.5b-ladder")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], dest="keys", metavar="KEY=VALUE")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    for name, (n_ranks, more) in LAYOUTS.items():
        keys = [*KEYS, f"train.steps={options.steps}", *options.keys, *more]
        subprocess.run(command(options.recipe, options.folder / name, n_ranks, keys), check=True, stdout=sys.stderr)
    found = {name: compared(options.folder / "one", options.folder / name) for name in LAYOUTS if name != "one"}
    print(json.dumps({"steps": options.steps, "recipe": options.recipe, "keys": options.keys, **found}, indent=1))


if __name__ == "__main__":
    main()
