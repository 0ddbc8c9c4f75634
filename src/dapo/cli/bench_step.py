"""`dapo bench step`: a whole DAPO step (rollout, verification, update) beside TRL's GRPOTrainer on the same work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.cli import trl_peer
from dapo.cli.bench_setting import device_name
from dapo.cli.bench_timing import free_memory
from dapo.cli.console import table_of, wide_console
from dapo.errors import ConfigError
from dapo.types import Judge, Judgement, StopReason, Verdict

if TYPE_CHECKING:
    from dapo.trainer.run import Run

OVERLONG_BUFFER = 16  # of the recipe whose other keys are taken over
SIDES = ("dapo", "trl", "trl-vllm")
Row = dict[str, Any]  # what is known of a side
CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz?.,:"


@dataclass(frozen=True, slots=True)
class Plan:
    """What both sides do: `prompts` groups a step, all used, every response exactly `tokens` long, one update."""

    prompts: int
    responses: int
    tokens: int
    steps: int  # the first is not counted
    hidden: int
    layers: int
    micro: int  # rows of a micro-batch of the peer; ours are by tokens
    device: str
    threads: int
    lr: float = 1e-4
    seed: int = 0
    use_vllm: bool = False


CPU = {"prompts": 8, "responses": 8, "tokens": 64, "steps": 8, "hidden": 128, "layers": 4, "micro": 64}
CUDA = {"prompts": 32, "responses": 16, "tokens": 512, "steps": 4, "hidden": 576, "layers": 30, "micro": 64}


def bench_step(
    sides: Annotated[str, typer.Option(help="Of dapo, trl, trl-vllm; default: what is here.")] = "",
    prompts: Annotated[int, typer.Option(min=0, help="Groups a step; 0: 8 on a CPU, 32 on a GPU.")] = 0,
    responses: Annotated[int, typer.Option(min=0, help="Responses of a group; 0: 8 or 16.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of every response; 0: 64 or 512.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Steps, the first of which is not counted; 0: 8 or 4.")] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="Width of the random Llama; 0: 128 or 576.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Its layers; 0: 4 or 30.")] = 0,
    micro: Annotated[int, typer.Option(min=0, help="Rows of a micro-batch of the peer; 0: 64.")] = 0,
    peer_python: Annotated[str, typer.Option(help="Interpreter that has TRL, if this one has not.")] = sys.executable,
    peer_minutes: Annotated[float, typer.Option(min=0, help="After so long a peer counts as not running.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Sides take turns so often, so that a busy hour hits all.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """A whole step of training: seconds and CPU seconds, beside TRL in a process of its own.

    Works as pasted:  dapo bench step --sides dapo --steps 3
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"prompts": prompts, "responses": responses, "tokens": tokens, "steps": steps}
    given |= {"hidden": hidden, "layers": layers, "micro": micro}
    sizes: dict[str, Any] = (CUDA if device == "cuda" else CPU) | {name: n for name, n in given.items() if n}
    sizes["micro"] = min(sizes["micro"], sizes["prompts"] * sizes["responses"])
    plan = Plan(**sizes, device=device, threads=torch.get_num_threads())
    check(plan)
    wanted = sides.split(",") if sides else ["dapo", "trl", *(["trl-vllm"] if device == "cuda" else [])]
    unknown = [name for name in wanted if name not in SIDES]
    if unknown:
        raise ConfigError(f"--sides {sides}: no side {unknown[0]}.", remedy=f"Choose of {', '.join(SIDES)}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        n_parameters = save_models(plan, folder)
        measured: dict[str, list[Row]] = {side: [] for side in wanted}
        for _ in range(rounds):
            for side in wanted:
                measured[side].append(measure(side, plan, folder, peer_python, peer_minutes))
    rows = {side: together(of_side) for side, of_side in measured.items()}
    ours = rows.get("dapo")
    for row in rows.values():
        if ours is not None and row is not ours and "seconds" in row:
            row["ours_is_faster"] = row["seconds"] / ours["seconds"]
            row["ours_is_faster_cpu"] = row["cpu_seconds"] / ours["cpu_seconds"]
    figures = {"plan": asdict(plan), "parameters": n_parameters, "device": device_name(device), "rounds": rounds}
    figures["sides"] = rows
    typer.echo(json.dumps(figures)) if as_json else show(figures)


def check(plan: Plan) -> None:
    if plan.steps < 2:
        raise ConfigError("--steps 1: the first step is not counted.", remedy="Run at least 2.")
    if plan.responses < 2:
        raise ConfigError(
            f"--responses {plan.responses}: a group of one has no baseline, so its advantage is undefined.",
            remedy="Use 2 or more.",
        )
    if plan.tokens <= OVERLONG_BUFFER:
        raise ConfigError(
            f"--tokens {plan.tokens}: the recipe's overlong buffer is {OVERLONG_BUFFER} tokens.", remedy="Use more."
        )
    if plan.hidden % 8:
        raise ConfigError(f"--hidden {plan.hidden}: four heads of an even size must fit.", remedy="A multiple of 8.")
    if plan.prompts * plan.responses % plan.micro:
        raise ConfigError(
            f"--micro {plan.micro}: {plan.prompts} x {plan.responses} rows cannot be dealt into such micro-batches.",
            remedy="Choose a divisor.",
        )


def save_models(plan: Plan, folder: Path) -> int:
    """The same random weights twice: `model` knows no end token, so responses have one length; TRL wants one.

    Returns the number of parameters.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    words = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=plan.hidden, intermediate_size=4 * plan.hidden,
        num_hidden_layers=plan.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2 * plan.tokens + 64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(plan.seed)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    for name, end in (("model", None), ("peer", "<eos>")):
        model.config.eos_token_id = model.generation_config.eos_token_id = None if end is None else words.index(end)
        model.save_pretrained(folder / name)
        tokenizer(words, end).save_pretrained(folder / name)
    return sum(parameter.numel() for parameter in model.parameters())


def tokenizer(words: list[str], end: str | None) -> Any:
    """One token a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token=end)


# ------------------------------------------------------------------ measuring


def measure(side: str, plan: Plan, folder: Path, peer_python: str, peer_minutes: float) -> Row:
    """One round of a side: the seconds of its steps, or what it says in place of them."""
    if side == "dapo":
        shutil.rmtree(folder / "run", ignore_errors=True)
        marks, parts = our_steps(plan, folder)
        return seconds_of(marks) | {"parts": parts, "settings": our_settings(plan)}
    return peer_steps(replace(plan, use_vllm=side == "trl-vllm"), folder, peer_python, peer_minutes)


def seconds_of(marks: list[tuple[float, float]]) -> Row:
    """Of every step but the first, from the clocks (wall, CPU) before the first and after each step."""
    wall, cpu = ([b[i] - a[i] for a, b in pairwise(marks)] for i in (0, 1))
    return {"wall": wall[1:], "cpu": cpu[1:], "first_s": wall[0]}


def together(rounds: list[Row]) -> Row:
    """Medians over the steps of all rounds; a round that did not run stands for all."""
    failed = next((row for row in rounds if "wall" not in row), None)
    if failed is not None:
        return failed
    row = {name: value for name, value in rounds[0].items() if name not in ("wall", "cpu")}
    row["seconds"], row["cpu_seconds"] = (
        statistics.median(s for each in rounds for s in each[name]) for name in ("wall", "cpu")
    )
    row["cpu_seconds_by_round"] = [round(statistics.median(each["cpu"]), 4) for each in rounds]
    return row


class DigitShare:
    """The peer's reward as a judge: graded, at once, in this process. Implements `Judge`."""

    def __init__(self) -> None:
        self.scores: dict[int, float] = {}
        self.n_tickets = 0

    def submit(
        self,
        response: str,
        answer: str,  # noqa: ARG002
        *,
        stop_reason: StopReason | None = None,  # noqa: ARG002
        meta: Mapping[str, object] | None = None,  # noqa: ARG002
    ) -> int:
        self.n_tickets += 1
        self.scores[self.n_tickets] = trl_peer.digit_share([response])[0]
        return self.n_tickets

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        return {ticket: Judgement(Verdict.WRONG, self.scores.pop(ticket), graded=True) for ticket in tickets}


def our_steps(plan: Plan, folder: Path) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """A run of this project as `dapo train` makes it, step by step; nothing is evaluated, saved or recorded."""
    import torch

    from dapo.trainer.loop import train_step

    run = make_run(plan, folder)
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        if plan.device == "cuda":
            torch.cuda.synchronize()
        marks.append((time.perf_counter(), time.process_time()))

    mark()
    for step in run.remaining_steps():
        train_step(run, step)
        mark()
    run.close()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("timing.sampling_s", "timing.old_logp_s", "timing.update_s")
    parts = {name: statistics.median(line[name] for line in lines[1:]) for name in names}
    del run
    free_memory()
    return marks, parts


def make_run(plan: Plan, folder: Path) -> Run:
    from dapo.trainer.api import with_overrides
    from dapo.trainer.start import begin_run

    problems = folder / "problems.jsonl"
    lines = [{"id": str(i), "question": trl_peer.sum_of(i), "answer": "0"} for i in range(plan.prompts * plan.steps)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    changes = {
        "model.path": str(folder / "model"), "data.train": str(problems),
        "limits.max_prompt_tokens": 16, "limits.max_response_tokens": plan.tokens,
        "shaping.overlong_filter": False, "shaping.overlong_penalty": 0.0,
        "sampling.dynamic": False, "sampling.prompts_per_step": plan.prompts,
        "sampling.responses_per_prompt": plan.responses,
        "rollout.max_concurrent_responses": plan.prompts * plan.responses,
        "train.steps": plan.steps, "train.lr": plan.lr, "train.warmup_steps": 0, "train.updates_per_step": 1,
        "train.tokens_per_microbatch": 65536 if plan.device == "cuda" else 8192, "train.seed": plan.seed,
        "eval.every_steps": 0, "checkpoint.every_steps": 0, "rollouts.every_steps": 0,
    }  # fmt: skip
    run = begin_run(
        with_overrides("quickstart", [f"{key}={json.dumps(value)}" for key, value in changes.items()]), folder / "run"
    )
    judge: Judge = DigitShare()
    run.collector.judge = judge
    return run


def our_settings(plan: Plan) -> str:
    from dapo.models.kernels.build import library

    on_cpu = "float32, parts in torch" if library() is None else "float32, parts compiled"
    precision = "bf16, float32 masters" if plan.device == "cuda" else on_cpu
    return f'preset "dapo", local engine, {precision}, without dynamic sampling, one update'


def peer_steps(plan: Plan, folder: Path, python: str, minutes: float) -> Row:
    (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(plan.threads), "TRANSFORMERS_VERBOSITY": "error"}
    environment.pop("PYTHONPATH", None)  # another interpreter has packages of its own
    said = folder / "peer.txt"
    try:
        with said.open("wb") as out:  # a file holds what it said also when its time is up
            peer = subprocess.Popen(
                [python, str(Path(trl_peer.__file__)), str(folder)],
                stdout=out, stderr=out, env=environment, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        return {"settings": f"did not run: {error}"}
    try:
        reason = f"exit {peer.wait(60 * minutes)}"
    except subprocess.TimeoutExpired:
        reason = f"{minutes:g} minutes are over"
    finally:  # also what it has started, and when we are interrupted
        with suppress(ProcessLookupError):
            os.killpg(peer.pid, signal.SIGKILL)
        peer.wait()
    words = said.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [json.loads(line) for line in words if line.startswith('{"trl"')]
    if not lines:
        last = next((line.strip() for line in reversed(words) if line.strip()), "nothing")
        sys.stderr.write("".join(f"peer: {line}\n" for line in words[-40:]))
        return {"settings": f"did not run: {reason}; its last words: {last}"}
    return seconds_of(lines[0]["marks"]) | {"settings": f"{lines[0]['trl']}: {lines[0]['settings']}"}


# ------------------------------------------------------------------ showing


def show(figures: dict[str, Any]) -> None:
    console = wide_console()
    plan = figures["plan"]
    console.print(
        f"{figures['parameters'] / 1e6:,.2f} M parameters, {plan['prompts']} prompts x {plan['responses']} responses "
        f"x {plan['tokens']} tokens, {figures['device']}, {plan['threads']} threads; "
        f"medians of {figures['rounds']} x {plan['steps'] - 1} steps"
    )
    names = ("side", "s a step", "CPU s a step", "ours is faster", "by CPU s", "settings")
    table = table_of(*names, figures=slice(1, 5))
    for name, row in figures["sides"].items():
        if "seconds" not in row:
            table.add_row(name, "", "", "", "", row["settings"])
            continue
        ratios = [f"{row[key]:.2f}x" if key in row else "" for key in ("ours_is_faster", "ours_is_faster_cpu")]
        table.add_row(name, f"{row['seconds']:.3f}", f"{row['cpu_seconds']:.3f}", *ratios, row["settings"])
    console.print(table)
    parts = figures["sides"].get("dapo", {}).get("parts")
    if parts:
        console.print("dapo: " + ", ".join(f"{name.removeprefix('timing.')} {s:.3f}" for name, s in parts.items()))
