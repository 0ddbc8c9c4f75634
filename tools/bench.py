"""Runs the benchmarks that this machine can, prints their figures as Markdown and writes them with their commands.

    python tools/bench.py cpu          # docs/results/bench-cpu.json; minutes on two cores
    python tools/bench.py gpu          # docs/results/bench-gpu.json; at most 10 minutes, the most telling first
    python tools/bench.py cpu --small  # tiny sizes, to see that it works; written to the folder of --out only
    python tools/bench.py compare OLD.json NEW.json    # figure | before | after | ratio

What the commands printed is kept in a folder named like the JSON file, which is written anew after every benchmark: a
machine that goes away takes one of them with it. The figures are compared with those of --before, by default the file
that is replaced, in a Markdown file of the same name. A benchmark that fails or takes too long is written down as
failed, with its message; the others go on, and the exit status is 1.
"""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# Each with the seconds after which it is ended. Ours come before the peers, which start slowly.
CPU = dict.fromkeys(
    (
        "bench verify",
        "bench sampling",
        "bench sampling --engine local",
        "bench step --sides dapo",
        "bench rollout --engines local,plain --slots 16 --new-tokens 64",
    ),
    1800,
)
GPU = {
    "bench rollout --shape 1.5b --engines local --load fixed,closed,few": 120,
    "bench train --shape 1.5b --loads 8x1024,lognormal:16:8192 --sides dapo,hf-masters": 90,
    "bench train --shape 1.5b --loads 2x4096c,1x16384c --sides dapo,hf-masters": 90,
    "bench train --shape 1.5b --loads 8x1024 --sides dapo,dapo-fsdp2": 60,
    "bench rollout --shape 7b --engines local": 90,
    "bench rollout --shape 135m --engines local": 60,
    "bench step --sides dapo,trl-vllm --steps 3 --peer-minutes 2": 180,
    "bench rollout --shape 1.5b --engines vllm --load fixed,few": 150,
    "bench rollout --shape qwen3-0.6b --engines local,vllm --load mixed": 120,
    "bench rollout --shape 1.5b --engines local --load open": 120,
    "bench train --shape 1.5b --preset ppo,grpo": 60,
    "bench rollout --shape 1.5b --engines local --load few --draft 4": 60,
}
SMALL = dict.fromkeys(
    (
        "bench verify --sample 2",
        "bench sampling --prompts-per-step 8 --responses 4 --steps 1",
        "bench step --sides dapo --prompts 2 --responses 4 --tokens 32 --steps 2",
    ),
    120,
)
GPU_MINUTES = 9.5
TOO_SHORT_S = 20  # a benchmark needs this long to start

# Options that choose rows of a result: without them a figure has the same name in whichever command measured it.
CHOOSING = ("--engines", "--load", "--loads", "--sides", "--peer-minutes")
LABELS = ("engine", "load", "slots")  # of a row in a list
# What is compared, by the end of its name; the first that matches tells which way is better.
BETTER = (
    (re.compile(r"tokens_per_s$|speed_over_[^ ]*$|ours_is_faster$"), "higher"),
    (re.compile(r"seconds$|(^|_)ms$|_s$|gib$|time_over_[^ ]*$"), "lower"),
)
SAME_AS_SPEED = {"seconds", "ms", "ms_per_step"}  # where tokens per second stand beside them
TOLERANCE = 0.03

Record = dict[str, Any]


class BenchError(Exception):
    """Something to tell whoever called, without a traceback."""


def main() -> None:
    arguments = parsed_arguments()
    try:
        sys.exit(compare(arguments) if arguments.kind == "compare" else run(arguments))
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        sys.exit(2)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the benchmarks that this machine can, or compare two runs.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, minutes in (("cpu", None), ("gpu", GPU_MINUTES)):
        kind = kinds.add_parser(name)
        kind.add_argument("--small", action="store_true", help="Tiny sizes, to see that it works.")
        kind.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="The folder to write to.")
        kind.add_argument("--minutes", type=float, default=minutes, help="For all of them together.")
        kind.add_argument("--before", type=Path, help="A record to compare with; default: the one that is replaced.")
    kind = kinds.add_parser("compare")
    kind.add_argument("old", type=Path)
    kind.add_argument("new", type=Path)
    kind.add_argument("--out", type=Path, help="Write the table to this file too.")
    return parser.parse_args()


# ------------------------------------------------------------------ running


def run(arguments: argparse.Namespace) -> int:
    limits = SMALL if arguments.small else GPU if arguments.kind == "gpu" else CPU
    path: Path = arguments.out / f"bench-{arguments.kind}.json"
    earlier = arguments.before or (path if path.exists() else None)
    before = read_record(earlier) if earlier else None
    raw = path.with_suffix("")
    raw.mkdir(parents=True, exist_ok=True)
    for stale in raw.glob("*.txt"):
        stale.unlink()
    end = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    record: Record = {"command": f"make bench{'-gpu' if arguments.kind == 'gpu' else ''}", **machine()}
    record["benchmarks"] = found = []
    for one in measured_in_turn(limits, raw, lambda: end - time.monotonic()):
        found.append(one)
        replace_text(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        print(as_markdown(one), flush=True)
    print(f"Written: {path}; what the commands printed: {raw}")
    if before:
        with suppress(BenchError):  # nothing in common: another list of benchmarks
            table = comparison(before, record, "before", "after")
            replace_text(path.with_suffix(".md"), table)
            print(f"{table}\nWritten: {path.with_suffix('.md')}")
    return int(any("failed" in one for one in found))


def measured_in_turn(limits: Mapping[str, float], raw: Path, left: Callable[[], float]) -> Iterator[Record]:
    """Every benchmark with what came of it, as soon as it is known. `left`: the seconds that remain for all."""
    for number, (command, limit) in enumerate(limits.items(), 1):
        if left() < TOO_SHORT_S:
            yield {"command": f"dapo {command}", "not_run": "no time left"}
        else:
            name = re.sub(r"[^\w.]+", "-", f"{number:02d}-{command}")
            yield measured(command, min(limit, left()), raw / name)


def measured(command: str, limit_s: float, raw: Path) -> Record:
    """The figures of a benchmark; its output goes to `raw`.out.txt and `raw`.err.txt."""
    start = time.monotonic()
    out, err = (raw.with_name(f"{raw.name}.{stream}.txt") for stream in ("out", "err"))
    status = run_limited([sys.executable, "-m", "dapo", *command.split(), "--json"], limit_s, out, err)
    found: Record = {"command": f"dapo {command}", "took_s": round(time.monotonic() - start, 1)}
    if status is None:
        return found | {"failed": f"not done within {limit_s:.0f} s"}
    said, complained = (path.read_text(encoding="utf-8", errors="replace").strip() for path in (out, err))
    if status == 0:
        with suppress(ValueError, IndexError):
            return found | {"figures": json.loads(said.splitlines()[-1])}
    return found | {"failed": (complained or said or "printed nothing")[-500:]}


def run_limited(command: list[str], limit_s: float, out: Path, err: Path) -> int | None:
    """The exit status, or None where its time was up. Nothing that it started goes on."""
    with out.open("wb") as said, err.open("wb") as complained:
        process = subprocess.Popen(command, stdout=said, stderr=complained, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # a benchmark ends its peers, which have sessions of their own
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machine() -> Record:
    """Where and when, and with which versions; the load tells how far seconds can be trusted."""
    import torch
    import transformers

    import dapo

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    versions = {"dapo": dapo.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": platform.machine(),
        "gpu": gpu,
        "load": round(os.getloadavg()[0], 1),
        "versions": versions | {"python": platform.python_version()},
    }


def commit() -> str:
    """Of this checkout, where there is one and git can tell."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def replace_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def as_markdown(found: Record) -> str:
    if "not_run" in found:
        return f"### `{found['command']}`\n\nnot run: {found['not_run']}\n"
    head = f"### `{found['command']}` ({found['took_s']} s)\n"
    if "failed" in found:
        return f"{head}\nfailed: {found['failed']}\n"
    rows = [f"| {name} | {shown(value)} |" for name, value in leaves(found["figures"])]
    return "\n".join([head, "| figure | value |", "|---|---|", *rows, ""])


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and word of a nested result, with the way to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name} · {key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for at, inner in enumerate(value):
            yield from leaves(inner, f"{name} · {label_of(inner) or at + 1}")
    else:
        yield name, value


def label_of(row: dict[str, Any]) -> str:
    return " ".join(str(row[key]) for key in LABELS if key in row)


def shown(value: Any) -> str:
    if not is_number(value):
        return str(value)
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class Change:
    """One figure of two runs."""

    figure: str
    better: str  # higher or lower
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_worse(self) -> bool:
        return self.ratio < 1 - TOLERANCE if self.better == "higher" else self.ratio > 1 + TOLERANCE


def compare(arguments: argparse.Namespace) -> int:
    table = comparison(read_record(arguments.old), read_record(arguments.new), arguments.old, arguments.new)
    print(table, end="")
    if arguments.out:
        replace_text(arguments.out, table)
    return 0


def read_record(path: Path) -> Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}.") from None
    except ValueError:
        raise BenchError(f"{path}: not JSON.") from None
    benchmarks = record.get("benchmarks") if isinstance(record, dict) else None
    if not isinstance(benchmarks, list) or not all(isinstance(one, dict) and "command" in one for one in benchmarks):
        raise BenchError(f"{path}: no record of this tool: it has no list of benchmarks with their commands.")
    return record


def comparison(before: Record, after: Record, old: object, new: object) -> str:
    """Both runs' common figures as a table, what became worse in bold."""
    changes = changes_between(figures_of(before), figures_of(after))
    if not changes:
        raise BenchError(f"{old} and {new} have no figure in common.")
    n_worse = sum(change.is_worse for change in changes)
    lines = [f"Before: {origin(before)}. After: {origin(after)}."]
    if before.get("gpu") != after.get("gpu"):
        lines.append("**Not the same machine: the ratios say nothing about the code.**")
    lines += [f"{n_worse} of {len(changes)} figures are worse by more than {TOLERANCE:.0%}.", ""]
    lines += ["| figure | better | before | after | ratio |", "|---|---|---|---|---|"]
    for change in changes:
        ratio = f"**{change.ratio:.3f}, worse**" if change.is_worse else f"{change.ratio:.3f}"
        lines.append(
            f"| {change.figure} | {change.better} | {shown(change.before)} | {shown(change.after)} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def origin(record: Record) -> str:
    versions = " ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    return ", ".join(str(record[key]) for key in ("date", "commit", "gpu") if key in record) + f", {versions}"


def figures_of(record: Record) -> dict[str, float]:
    """What can be compared, by name; of a figure that was measured twice the first."""
    found: dict[str, float] = {}
    for one in record["benchmarks"]:
        numbers = {name: value for name, value in leaves(one.get("figures", {})) if is_number(value)}
        for name, value in numbers.items():
            row, _, last = name.rpartition(" · ")
            is_repeated = last in SAME_AS_SPEED and (f"{row} · tokens_per_s" if row else "tokens_per_s") in numbers
            if better(last) and not is_repeated:
                found.setdefault(f"{subject(one['command'])} · {name}", float(value))
    return found


def subject(command: str) -> str:
    """The command without `dapo bench` and without what chooses among rows."""
    words = command.removeprefix("dapo ").removeprefix("bench ").split()
    chosen = {at for at, word in enumerate(words) if word in CHOOSING}
    return " ".join(word for at, word in enumerate(words) if at not in chosen and at - 1 not in chosen)


def better(name: str) -> str | None:
    return next((direction for pattern, direction in BETTER if pattern.search(name)), None)


def changes_between(before: Mapping[str, float], after: Mapping[str, float]) -> list[Change]:
    common = [name for name in after if before.get(name) and after[name]]  # 0: a clock too coarse, no ratio
    return [Change(name, better(name.rpartition(" · ")[2]) or "", before[name], after[name]) for name in common]


if __name__ == "__main__":
    main()
