"""A run on a Ray cluster: actors in a placement group start the rank processes, watch them, and restart them.

The ranks talk to each other as under torchrun; nothing of a run passes through Ray or the driver but commands and exit
codes. A rank or node that is lost ends all ranks, and they start again from the newest checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from dapo.commands import dapo_command
from dapo.config.schema import ClusterConfig
from dapo.errors import ConfigError, EngineError
from dapo.processes import SAFE_PATH, python_command

# Variables of the driver that the ranks get too.
PASSED_ON = ("PYTHONPATH", "PATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", SAFE_PATH)
MAX_RESTARTS = 3  # in a row without a new checkpoint in between
GRACE_S = 6.0  # for the other ranks to notice that one is gone
PR_SET_PDEATHSIG = 1


class RankProcess:
    """An actor: one rank as a process of its own, which dies with it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """This node, and a port of it that is free now."""
        import ray

        host = str(ray.util.get_node_ip_address())
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, log: str) -> None:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with Path(log).open("ab") as out:
            self.process = subprocess.Popen(
                python_command("-u", *command),
                env={**os.environ, **environment},
                cwd=folder,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        assert self.process is not None, "a rank is started before it is asked"
        return self.process.poll()

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(slots=True)
class Attempt:
    """The actors of one attempt, and where each rank writes its log."""

    actors: list[Any]
    group: Any
    logs: list[Path]
    shown: int = 0  # bytes of the first rank's log that the user has seen
    codes: dict[int, int | None] = field(default_factory=dict)

    def show(self) -> None:
        """Print what the first rank has logged since the last call."""
        if self.logs[0].exists():
            with self.logs[0].open("rb") as file:
                file.seek(self.shown)
                text = file.read()
            self.shown += len(text)
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()

    def poll(self) -> None:
        """Exit codes; an actor that is lost counts as killed."""
        import ray

        for rank, actor in enumerate(self.actors):
            if self.codes.get(rank) is None:
                try:
                    self.codes[rank] = ray.get(actor.poll.remote(), timeout=60)
                except ray.exceptions.RayError:
                    self.codes[rank] = -signal.SIGKILL

    @property
    def failed(self) -> dict[int, int]:
        return {rank: code for rank, code in self.codes.items() if code}

    @property
    def is_done(self) -> bool:
        return all(code is not None for code in self.codes.values())

    def end(self) -> None:
        import ray

        for actor in self.actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        ray.util.remove_placement_group(self.group)


def supervise(cluster: ClusterConfig, command_for: Callable[[], list[str]], folder: Path, *, on_gpus: bool) -> None:
    """Run `cluster.gpus` ranks to their end. `command_for` is their command: train, or resume.

    Each rank has a GPU of its own where the cluster has some and they are wanted.
    """
    is_cuda = connect() > 0 and on_gpus
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    restarts, newest = 0, checkpoints_of(folder)
    try:
        while True:
            ranks = start_ranks(cluster, command_for(), folder, is_cuda=is_cuda)
            try:
                watch(ranks, asked)
                if not ranks.failed:
                    return
                report(ranks)
            finally:
                ranks.end()
            was_killed = any(code < 0 for code in ranks.failed.values())
            restarts = 0 if checkpoints_of(folder) != newest else restarts + 1
            newest = checkpoints_of(folder)
            if not was_killed or asked or restarts > MAX_RESTARTS:
                raise EngineError(
                    f"cluster.backend = ray: {why(ranks)}.",
                    remedy=f"Its log is above it in {ranks.logs[0].parent}. Resume: {dapo_command('resume', folder)}",
                )
            print(f"Starting again from the newest checkpoint ({newest or 'none yet'}).", flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def connect() -> float:
    """Connect to the running cluster. Returns its number of GPUs."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "cluster.backend = ray: the package ray is not installed.", remedy='Install it: pip install "dapo[ray]"'
        ) from error
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ConfigError(
            "cluster.backend = ray: no Ray cluster was found from here.",
            remedy="Start one (ray start --head), or set RAY_ADDRESS.",
        ) from error
    return float(ray.cluster_resources().get("GPU", 0.0))


def start_ranks(cluster: ClusterConfig, command: list[str], folder: Path, *, is_cuda: bool) -> Attempt:
    """One actor per rank, each in a bundle of one placement group, which waits for resources."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": 1.0, **({"GPU": 1.0} if is_cuda else {})}
    group = ray.util.placement_group([needs] * cluster.gpus, strategy="PACK")
    if not group.wait(cluster.timeout_s):
        ray.util.remove_placement_group(group)
        raise EngineError(
            f"cluster.gpus = {cluster.gpus}: the Ray cluster had no room for them in {cluster.timeout_s} s.",
            remedy="Lower cluster.gpus, or add nodes.",
        )
    actor = ray.remote(num_cpus=1, num_gpus=int(is_cuda), max_restarts=0)(RankProcess)
    actors = [
        actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        ).remote()
        for rank in range(cluster.gpus)
    ]
    log_folder = folder.with_name(f"{folder.name}.logs")  # outside the run's folder, which must be new
    attempt = len(list(log_folder.glob("rank-0.*.log")))  # of this driver and of those before it
    logs = [log_folder / f"rank-{rank}.{attempt}.log" for rank in range(cluster.gpus)]
    ranks = Attempt(actors, group, logs)
    host, port = ray.get(actors[0].address.remote())
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(cluster.gpus)}
        place = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        ray.get(actors[rank].start.remote(command, {**passed, **own, **place}, os.getcwd(), str(log)))
        ranks.codes[rank] = None
    return ranks


def watch(ranks: Attempt, asked: list[int]) -> None:
    """Forward signals and show the log until all ranks have ended, or one has failed and the others could react."""
    n_forwarded = 0
    while not ranks.is_done and not ranks.failed:
        time.sleep(0.5)
        for number in asked[n_forwarded:]:  # one rank is enough: they agree on it
            ranks.actors[0].send.remote(number)
        n_forwarded = len(asked)
        ranks.poll()
        ranks.show()
    deadline = time.monotonic() + GRACE_S
    while not ranks.is_done and time.monotonic() < deadline:
        time.sleep(0.5)
        ranks.poll()
    ranks.show()


def why(ranks: Attempt) -> str:
    """The rank that was killed, or one that failed, and its log."""
    rank, code = min(ranks.failed.items(), key=lambda pair: pair[1])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how} (log: {ranks.logs[rank]})"


def report(ranks: Attempt) -> None:
    """The last lines of the failed ranks' logs, then how the run failed."""
    for rank in ranks.failed:
        if rank and ranks.logs[rank].exists():
            tail = ranks.logs[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
            sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in tail))
    sys.stderr.write(f"{why(ranks)}\n")


def checkpoints_of(folder: Path) -> str:
    """The newest checkpoint's name."""
    return max((path.name for path in (folder / "checkpoints").glob("[sv]*-*")), default="")
