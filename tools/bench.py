"""Runs the benchmarks that this machine can, prints their figures as Markdown and writes them with their commands.

    python tools/bench.py cpu          # docs/results/bench-cpu.json; minutes on two cores
    python tools/bench.py gpu          # docs/results/bench-gpu.json; beside every peer that is installed
    python tools/bench.py cpu --small  # tiny sizes, to see that it works; written to the folder of --out only

A benchmark that fails is written down as failed, with its message; the others go on, and the exit status is 1.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

CPU = (
    "bench verify",
    "bench sampling",
    "bench sampling --engine local",
    "bench step --sides dapo",
    "bench rollout --engines local,plain --slots 16 --new-tokens 64",
)
GPU = (
    "bench rollout --shape 135m",
    "bench rollout --shape 1.5b --load fixed,closed,few",
    "bench rollout --shape 1.5b --engines local --load open",
    "bench rollout --shape 7b",
    "bench train --shape 1.5b --loads 8x1024,lognormal:16:8192",
    "bench train --shape 1.5b --loads 2x4096c,1x16384c",
    "bench train --shape 1.5b --loads 8x1024 --sides dapo,dapo-fsdp2",
    "bench train --shape 1.5b --preset ppo,grpo",
    "bench step",
)
SMALL = (
    "bench verify --sample 2",
    "bench sampling --prompts-per-step 8 --responses 4 --steps 1",
    "bench step --sides dapo --prompts 2 --responses 4 --tokens 32 --steps 2",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the benchmarks that this machine can.")
    parser.add_argument("kind", choices=("cpu", "gpu"))
    parser.add_argument("--small", action="store_true", help="Tiny sizes, to see that it works.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    commands = SMALL if arguments.small else GPU if arguments.kind == "gpu" else CPU
    record = {"command": f"make bench{'-gpu' if arguments.kind == 'gpu' else ''}", **machine(), "benchmarks": []}
    for command in commands:
        found = measured(command)
        record["benchmarks"].append(found)
        print(as_markdown(found), flush=True)
    path = arguments.out / f"bench-{arguments.kind}.json"
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    print(f"Written: {path}")
    sys.exit(any("failed" in found for found in record["benchmarks"]))


def machine() -> dict[str, object]:
    """Where and when, and with which versions; the load tells how far seconds can be trusted."""
    import torch
    import transformers

    import dapo

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    versions = {"dapo": dapo.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": platform.machine(),
        "gpu": gpu,
        "load": round(os.getloadavg()[0], 1),
        "versions": versions | {"python": platform.python_version()},
    }


def measured(command: str) -> dict[str, object]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "dapo", *command.split(), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    found: dict[str, object] = {"command": f"dapo {command}", "took_s": round(time.monotonic() - start, 1)}
    if done.returncode != 0:
        return found | {"failed": (done.stderr.strip() or done.stdout.strip())[-500:]}
    return found | {"figures": json.loads(done.stdout.splitlines()[-1])}


def as_markdown(found: dict[str, object]) -> str:
    head = f"### `{found['command']}` ({found['took_s']} s)\n"
    if "failed" in found:
        return f"{head}\nfailed: {found['failed']}\n"
    rows = [f"| {name} | {value} |" for name, value in leaves(found["figures"])]
    return "\n".join([head, "| figure | value |", "|---|---|", *rows, ""])


def leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Every number and word of a nested result, with the way to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name} · {key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for at, inner in enumerate(value):
            yield from leaves(inner, f"{name} {at + 1}")
    else:
        yield name, f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
