"""The heartbeat of a rank: a small file in the run's folder that says what it waits for, since when, and where.

Written every few seconds by a thread of its own, because a file system that blocks must not stop the watchdog; read by
`dapo doctor`, and by other ranks that want to know whom they wait for.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

FOLDER = "heartbeat"
MOST_BYTES = 1 << 20
BEGIN_S = 0.1  # between two looks whether the run has begun: a rank that is held up at once is named as well
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waited:
    """One wait of a thread."""

    what: str
    seconds: float
    collective: int | None = None
    holders: list[str] = field(default_factory=list)  # stacks of processes that are waited for


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank at one moment. The innermost wait is the last; no wait: it is at work."""

    rank: int
    size: int
    host: str
    pid: int
    born: int  # when the process began, in ticks of its kernel: another process may get its number
    unix_s: float
    waits: list[Waited] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)  # of the thread that trains, innermost last
    others: dict[str, list[Waited]] = field(default_factory=dict)  # waits of other threads, by their names
    ended: str = ""  # why the watchdog ended it


def path_of(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank}.json"


def has_begun(folder: Path) -> bool:
    """Before that, a run may leave no folder behind."""
    return (folder / "config.toml").exists()


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    """A reader sees the old one or the new one. Not flushed: after a crash of the machine nobody needs it."""
    path = path_of(folder, beat.rank)
    aside = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(exist_ok=True)
    aside.unlink(missing_ok=True)  # a link in its place may lead anywhere
    aside.write_text(json.dumps(asdict(beat), ensure_ascii=False), encoding="utf-8", errors="replace")
    aside.replace(path)


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Of all ranks, in their order; what is none is left out."""
    found = [beat for path in (folder / FOLDER).glob("rank-*.json") if (beat := read_one(path)) is not None]
    return sorted(found, key=lambda beat: beat.rank)


def read_one(path: Path) -> Heartbeat | None:
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        return from_json(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def from_json(raw: dict[str, Any]) -> Heartbeat:
    """Every field by its type: a run's folder may be anybody's."""
    return Heartbeat(
        rank=int(raw["rank"]),
        size=int(raw["size"]),
        host=str(raw["host"]),
        pid=int(raw["pid"]),
        born=int(raw["born"]),
        unix_s=float(raw["unix_s"]),
        ended=str(raw["ended"]),
        waits=[waited(one) for one in raw["waits"]],
        stack=[str(line) for line in raw["stack"]],
        others={str(name): [waited(one) for one in waits] for name, waits in raw["others"].items()},
    )


def waited(raw: dict[str, Any]) -> Waited:
    collective = raw["collective"]
    holders = [str(line) for line in raw["holders"]]
    return Waited(str(raw["what"]), float(raw["seconds"]), None if collective is None else int(collective), holders)


def forget_heartbeats(folder: Path, keep: int) -> None:
    """Remove those of ranks from `keep` on: the run had more of them once."""
    for path in (folder / FOLDER).glob("*rank-*.json*"):
        number = path.name.lstrip(".").removeprefix("rank-").partition(".")[0]
        if not number.isdecimal() or int(number) >= keep:
            with suppress(OSError):
                path.unlink()


def forget_heartbeat(folder: Path, rank: int) -> None:
    """Of a rank that has come to its end; the last one removes the folder."""
    with suppress(OSError):
        path_of(folder, rank).unlink(missing_ok=True)
        (folder / FOLDER).rmdir()


def this_host() -> str:
    return socket.gethostname()


def born(pid: int) -> int:
    """When a process of this machine began, in ticks; 0 where it cannot be told."""
    fields = status_of(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def status_of(pid: int) -> list[str]:
    """Of /proc/PID/stat what stands behind the process's name: the first field is its state. Empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """work(), unless that takes longer: None, and its thread is left to itself. For what a file system may block."""
    answers: list[T] = []
    errors: list[Exception] = []

    def do() -> None:
        try:
            answers.append(work())
        except Exception as error:  # raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=do, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return answers[0] if answers else None


class Writer:
    """Writes the newest heartbeat it was given, whenever the file system lets it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: Heartbeat | None = None
        self.is_closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.serve, name="heartbeat", daemon=True)
        self.thread.start()

    def put(self, beat: Heartbeat) -> None:
        with self.changed:
            self.newest = beat
            self.changed.notify()

    def serve(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.newest is not None or self.is_closing)
                beat, self.newest = self.newest, None
            if beat is None:
                return
            with suppress(OSError):  # a full disk is reported where the run itself writes
                if has_begun(self.folder):
                    write_heartbeat(self.folder, beat)
                else:
                    self.keep(beat)

    def keep(self, beat: Heartbeat) -> None:
        """Try again soon, with a newer one if there is one by then."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.newest is not None or self.is_closing, BEGIN_S):
                self.newest = beat

    def close(self, seconds: float) -> None:
        """Let the last one be written, if that does not take long."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()
        self.thread.join(seconds)


def own_identity() -> dict[str, Any]:
    return {"host": this_host(), "pid": os.getpid(), "born": born(os.getpid())}
