"""`dapo bench`: speed compared with other frameworks that are installed; ratios are measured in one run."""

from __future__ import annotations

import typer

from dapo.bench.parity.command import bench_parity
from dapo.bench.rollout import bench_rollout
from dapo.bench.sampling import bench_sampling
from dapo.bench.step import bench_step
from dapo.bench.train import bench_train
from dapo.bench.verify import bench_verify

command = typer.Typer(no_args_is_help=True, help="Compare speed with other frameworks that are installed.")
command.command("parity")(bench_parity)
command.command("rollout")(bench_rollout)
command.command("sampling")(bench_sampling)
command.command("step")(bench_step)
command.command("train")(bench_train)
command.command("verify")(bench_verify)


@command.callback()
def options() -> None:
    """Each subcommand measures one part; all print ratios from one run on this machine."""
