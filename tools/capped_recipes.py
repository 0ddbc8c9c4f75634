"""Every recipe for a GPU on one GPU, with as much memory as its card has: what runs, and how far the estimate is off.

    python tools/capped_recipes.py --weights 0.5b=DIR --weights 1.5b=DIR     # all, one after the other
    python tools/capped_recipes.py --list                                    # what there is to do
    python tools/capped_recipes.py --only gsm8k-1.5b-24gb --minutes 4
    python tools/capped_recipes.py --budget-minutes 9                        # begin nothing that could end later
    python tools/capped_recipes.py --table                                   # what the README says of each
    python tools/capped_recipes.py --device cpu --shrink --out tried.json    # a rehearsal with tiny random models

Each runs in a process of its own, under `model.gpu_memory_gib`, through `dapo.train`: some steps on stand-in problems,
with the weights of --weights or random ones of the same shape, and a verdict by chance, so that groups are mixed. A
step has as many prompts as fill the engine once. Recipes for several cards: what one rank holds (tools/one_rank.py).
What is in the results already is not run again; what failed for another reason than memory is not in them. The peak
is the card's own count of that process: others may run beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "capped-recipes.json"
H200_GIB = 139.0
PROBLEMS = 512
TEACHER = "1.5b"  # of distillation
MEMORY_WORDS = ("out of memory", "OutOfMemoryError", "is not free on the device", "rollout.kv_cache_gib = ")


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe and the card that it is for."""

    recipe: str
    gib: float
    size: str = ""  # of the model, as --weights calls it
    sets: tuple[str, ...] = ()
    fits: bool = False  # with the settings of --fit
    is_share: bool = False  # of several cards

    @property
    def kind(self) -> str:
        return "one rank's share" if self.is_share else "a run"

    @property
    def name(self) -> str:
        return " ".join([self.recipe, *self.sets, *([f"--fit {self.gib:g}gb"] if self.fits else [])])


EIGHT_OF_EIGHT = (
    "sampling.prompts_per_step=8",
    "limits.max_response_tokens=1024",
    "rollout.max_concurrent_sequences=64",
)
TRIALS = (  # the most telling first
    Trial("gsm8k-0.5b-lora-8gb", 8, "0.5b"),
    Trial("gsm8k-1.5b-qlora-8gb", 8, "1.5b"),
    Trial("math-7b-qlora-24gb", 24),
    Trial("math-7b-qlora-24gb", 24, sets=EIGHT_OF_EIGHT),
    Trial("gsm8k-1.5b-24gb", 24, "1.5b"),
    Trial("math-1.5b-80gb", 80, "1.5b"),
    Trial("gsm8k-coder-1.5b-h200", H200_GIB, "1.5b", ("preset=vapo",)),
    Trial("dapo-math-7b-8x80gb", 80, is_share=True),
    Trial("dapo-qwen2.5-32b", 80, is_share=True),
    Trial("gsm8k-coder-1.5b-h200", 16, "1.5b", fits=True),
    Trial("gsm8k-coder-1.5b-h200", 48, "1.5b", fits=True),
    Trial("gsm8k-coder-0.5b-ladder", H200_GIB / 4, "0.5b"),
    Trial("gsm8k-coder-0.5b-distill-h200", H200_GIB, "0.5b"),
    Trial("arithmetic-smollm2-135m", 24),
    Trial("gsm8k-coder-1.5b-h200", H200_GIB, "1.5b"),
    Trial("gsm8k-coder-1.5b-python-h200", H200_GIB, "1.5b"),
    Trial("countdown-coder-0.5b-h200", H200_GIB, "0.5b"),
    Trial("countdown-coder-1.5b-h200", H200_GIB, "1.5b"),
)


def coin(response: str, answer: str, meta: dict[str, Any]) -> float:  # noqa: ARG001  a verifier's arguments
    """A verdict by chance that depends on the response alone: groups are mixed, whatever the weights are."""
    return 1.0 if zlib.crc32(response.encode("utf-8", "replace")) % 2 else -1.0


# ------------------------------------------------------------------ one trial, in its own process


@dataclass(slots=True)
class Settings:
    """How trials are run."""

    device: str
    steps: int
    weights: dict[str, str] = field(default_factory=dict)  # of a size, the folder
    shrink: bool = False


SMALL = (  # of a rehearsal
    "limits.max_prompt_tokens=192",
    "limits.max_response_tokens=24",
    "sampling.prompts_per_step=4",
    "sampling.responses_per_prompt=4",
    "rollout.max_concurrent_sequences=16",
    "train.tokens_per_microbatch=1024",
    "train.updates_per_step=2",
)


def tried(trial: Trial, settings: Settings, folder: Path) -> dict[str, Any]:
    """Run it here and say what came of it; what fails raises."""
    from dapo.config import load_recipe
    from dapo.config.machine import GIB
    from dapo.config.model_shapes import shape_of
    from dapo.planning.fit import fit
    from dapo.planning.plan import memory_of

    small = list(SMALL) if settings.shrink else []
    recipe = str(rewritten(trial.recipe, folder, settings))
    config = load_recipe(recipe, [*trial.sets, *small]).config
    shape = shape_of(config.model.path)
    assert shape is not None, f"{trial.recipe}: the shape of {config.model.path} is not known"
    if settings.shrink:
        shape = shrunk(shape)
    chosen = [one.override for one in fit(config, shape, trial.gib).choices] if trial.fits else []
    config = load_recipe(recipe, [*trial.sets, *small, *chosen]).config
    gpus = config.cluster.gpus
    if trial.is_share:
        from one_rank import share

        found = share(config, shape, gib=trial.gib, device=settings.device, steps=settings.steps)
    else:
        found = trained(trial, settings, recipe, config, shape, folder, [*small, *chosen])
    fixed = memory_of(config, shape, is_cuda=settings.device == "cuda", gpus=gpus).fixed / GIB
    found["estimate_gib"] = {"fixed": round(fixed, 2), "kv_cache": found.pop("kv_cache_gib")}
    return found | {"settings": [*trial.sets, *chosen]} | torch_peaks(settings.device)


def trained(
    trial: Trial, settings: Settings, recipe: str, config: Any, shape: Any, folder: Path, sets: list[str]
) -> dict[str, Any]:
    """A run of some steps through `dapo.train`."""
    import dapo
    from dapo.config.machine import GIB
    from dapo.config.model_shapes import shape_of

    real = settings.weights.get(trial.size)
    longest = config.limits.max_response_tokens
    model = real or save_random(shape, folder / "model", longest, settings.device)
    group = config.sampling.responses_per_prompt
    prompts = min(config.sampling.prompts_per_step, math.ceil(config.rollout.max_concurrent_sequences / group))
    teacher = []
    if config.algorithm.kl.path:
        taught_by = shape_of(config.algorithm.kl.path)
        assert taught_by is not None, f"{trial.recipe}: the shape of {config.algorithm.kl.path} is not known"
        taught_by = shrunk(taught_by) if settings.shrink else taught_by
        path = settings.weights.get(TEACHER) or save_random(taught_by, folder / "teacher", longest, settings.device)
        teacher = [f"algorithm.kl.path={json.dumps(str(path))}"]
    overrides = [
        *trial.sets,
        *teacher,
        *sets,
        f"model.path={json.dumps(str(model))}",
        f"model.device={settings.device}",
        *([f"model.gpu_memory_gib={trial.gib}"] if settings.device == "cuda" else []),
        *([] if real else ["data.template=raw", "data.chat_template=false"]),
        f"train.steps={settings.steps}",
        "train.warmup_steps=0",
        "train.lr_decay=none",
        f"sampling.prompts_per_step={prompts}",
        f"train.updates_per_step={min(config.train.updates_per_step, prompts)}",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
        "checkpoint.resumable=false",
        "records.every_steps=0",
        *(["algorithm.critic.pretrain_responses=0"] if config.has_critic else []),
    ]
    questions = [dapo.Problem(str(i), f"What is {i} + {i * i % 97}? Explain.", str(i)) for i in range(PROBLEMS)]
    watch = Watch()
    result = dapo.train(
        recipe,
        out=folder / "run",
        overrides=overrides,
        problems=questions,
        reward=f"{Path(__file__).resolve()}:coin",
        callbacks=[watch],
    )
    return {
        "weights": "real" if real else "random",
        "steps": result.step,
        "prompts_per_step": prompts,
        "kv_cache_gib": round(watch.kv_bytes / GIB, 2),
        "memory_events": watch.shortages,
    }


def rewritten(recipe: str, folder: Path, settings: Settings) -> Path:
    """The recipe with one source of problems; of a rehearsal also with what the sizes there leave no room for."""
    import tomllib

    import tomli_w

    text = (ROOT / "src/dapo/config/recipes" / f"{recipe}.toml").read_text(encoding="utf-8")
    raw = tomllib.loads(text)
    raw["data"] |= {"train": "stand-in.jsonl", "eval": []}
    if settings.shrink:
        raw["shaping"] = raw.get("shaping", {}) | {"overlong_buffer_tokens": 8}
        raw.get("rollout", {}).pop("kv_cache_gib", None)
    path = folder / f"{recipe}.toml"
    path.write_text(tomli_w.dumps(raw), encoding="utf-8")
    return path


class Watch:
    """An observer: the size of the KV cache, and what the run had to do for want of memory."""

    def __init__(self) -> None:
        self.kv_bytes = 0
        self.shortages: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)

    def on_start(self, run: Any) -> None:
        engine = getattr(run.engine, "inner", run.engine)
        self.kv_bytes = engine._decoder.cache.data.nbytes

    def on_event(self, kind: str, message: str) -> None:
        if kind == "memory":
            self.shortages.append(message)


def shrunk(shape: Any) -> Any:
    """The same kind of model, small enough for a test."""
    from dataclasses import replace

    return replace(
        shape,
        layers=2,
        hidden=32,
        feed_forward=48,
        heads=4,
        kv_heads=2,
        head_size=8,
        vocabulary=min(shape.vocabulary, 64),
    )


def save_random(shape: Any, folder: Path, longest: int, device: str) -> Path:
    """A model folder with random weights and a tokenizer of single characters.

    Tokens are about equally likely, so that so many of them end a response that half of `longest` is the mean.
    """
    import torch

    from dapo.bench.step_plan import CHARACTERS, tokenizer
    from dapo.models.random_model import random_model

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(shape, dtype=dtype, device=device, attention="eager")
    words = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    ends = range(shape.vocabulary - math.ceil(2 * shape.vocabulary / longest), shape.vocabulary)
    model.config.eos_token_id = model.generation_config.eos_token_id = list(ends)
    model.save_pretrained(folder)
    tokenizer(words, None).save_pretrained(folder)
    if device == "cuda":
        del model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return folder


def torch_peaks(device: str) -> dict[str, float]:
    """By torch's own count: of tensors, and of what its allocator took for them."""
    if device != "cuda":
        return {}
    import torch

    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {f"peak_{name}_gib": round(size / 2**30, 2) for name, size in peaks.items()}


# ------------------------------------------------------------------ all of them


class CardWatch(threading.Thread):
    """Asks the driver twice a second how much of the card the processes of a group hold, CUDA's own memory included."""

    def __init__(self, group: int) -> None:
        super().__init__(daemon=True)
        self._program, self._group = shutil.which("nvidia-smi"), group
        self._is_over = threading.Event()
        self._most = 0.0

    def _used(self) -> float:
        """In GiB. Other programs on the card do not count; a process that is gone holds nothing."""
        asked = [str(self._program), "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "--id=0"]
        try:
            said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
        except (subprocess.SubprocessError, OSError):
            return 0.0
        held = 0.0
        for line in said.splitlines():
            with contextlib.suppress(ProcessLookupError, ValueError):
                pid, size = line.split(",")
                held += float(size) / 1024 * (os.getpgid(int(pid)) == self._group)
        return held

    def run(self) -> None:
        while self._program is not None and not self._is_over.wait(0.5):
            self._most = max(self._most, self._used())

    def peak_gib(self) -> float | None:
        """Nothing where the driver does not tell."""
        self._is_over.set()
        return round(self._most, 2) or None


def in_its_own_process(trial: Trial, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the results, whatever becomes of the trial."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dapo-capped-") as scratch:
        answer = Path(scratch) / "row.json"
        command = [sys.executable, __file__, "--one", trial.name, "--out", str(answer), "--device", options.device]
        command += ["--steps", str(options.steps), *(["--shrink"] if options.shrink else [])]
        command += [part for pair in options.weights for part in ("--weights", pair)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        child = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        watch = CardWatch(child.pid)
        watch.start()
        try:
            said, _ = child.communicate(timeout=60 * options.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # it leads a group of its own: its workers end with it
            said, _ = child.communicate()
            said += f"\nnot finished after {options.minutes:g} minutes"
        row = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    row = {"recipe": trial.recipe, "card_gib": round(trial.gib, 2), "kind": trial.kind, "ran": bool(row), **row}
    if not row["ran"]:
        row["why_not"] = " ".join(said.strip().splitlines()[-3:])[-400:]
        row["is_memory"] = any(word in said for word in MEMORY_WORDS)
    return row | {"peak_gib": watch.peak_gib(), "seconds": round(time.monotonic() - began, 1)}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"trials": {}}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Where and how the trials ran."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    return {
        "command": "python tools/capped_recipes.py" + " --weights SIZE=DIR" * bool(options.weights),
        "machine": device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "date": date.today().isoformat(),
    }


def run_all(options: argparse.Namespace) -> None:
    """Those that are not in the results yet, each written as soon as it is known."""
    from dapo.files import replace_file

    began, path = time.monotonic(), Path(options.out)
    results = {**described(options), "trials": read(path)["trials"]}
    for trial in chosen(options.only):
        known = results["trials"].get(trial.name)
        if known is not None and (known["ran"] or not options.again):
            continue
        left = options.budget_minutes - (time.monotonic() - began) / 60
        if left < options.minutes:
            print(f"{left:.1f} minutes left: {trial.name} is for another time", flush=True)
            continue
        row = in_its_own_process(trial, options)
        if not row["ran"] and not row["is_memory"]:  # something else is missing: that says nothing of the card
            print(f"{trial.name}: not tried: {row['why_not']}", flush=True)
            continue
        results["trials"][trial.name] = row
        print(f"{trial.name}: {said_of(row)} ({row['seconds']} s)", flush=True)
        replace_file(path, json.dumps(results, indent=2) + "\n")


def chosen(only: list[str]) -> list[Trial]:
    unknown = [name for name in only if not any(name in (trial.name, trial.recipe) for trial in TRIALS)]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no such trial; --list prints them.")
    return [trial for trial in TRIALS if not only or trial.name in only or trial.recipe in only]


def said_of(row: dict[str, Any]) -> str:
    """What the README says of a trial."""
    share = f"{row['kind']} " if row["kind"] != "a run" else ""
    card = f"{share}in {row['card_gib']:g} GB"
    if not row["ran"]:
        return f"did not run {card}"
    peak = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
    estimate = sum(row["estimate_gib"].values())
    fewer = "; smaller micro-batches" if row.get("memory_events") else ""
    return f"ran {card}: {row['steps']} steps with stand-ins{peak}, estimated {estimate:.1f}{fewer}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", action="append", default=[], metavar="SIZE=DIR", help="real ones, of 0.5b or 1.5b")
    parser.add_argument("--only", action="append", default=[], metavar="RECIPE", help="this one; repeat for several")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4, help="the most that one may take")
    parser.add_argument("--budget-minutes", type=float, default=math.inf, help="the most that all may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shrink", action="store_true", help="tiny random models: a rehearsal")
    parser.add_argument("--out", default=str(RESULTS), help="the results, read and extended")
    parser.add_argument("--again", action="store_true", help="also what did not fit before")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{trial.gib:6g} GB  {trial.name}" for trial in TRIALS))
    elif options.table:
        print("\n".join(f"{name}: {said_of(row)}" for name, row in read(Path(options.out))["trials"].items()))
    elif options.one:
        settings = Settings(
            options.device, options.steps, dict(w.split("=", 1) for w in options.weights), options.shrink
        )
        trial = next(trial for trial in TRIALS if trial.name == options.one)
        with tempfile.TemporaryDirectory(prefix="dapo-capped-") as folder:
            row = tried(trial, settings, Path(folder))
        Path(options.out).write_text(json.dumps(row), encoding="utf-8")
    elif options.device == "cuda" and not has_gpu():
        raise SystemExit("--device cuda: torch sees no GPU here. For a rehearsal: --device cpu --shrink --out FILE.")
    else:
        run_all(options)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
