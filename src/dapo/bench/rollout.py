"""`dapo bench rollout`: tokens per second of this project's engines and of other installed ones."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from dapo.bench.setting import LIMITS, BenchSetup, choose_shape
from dapo.bench.timing import free_memory
from dapo.console import table_of, wide_console
from dapo.errors import ConfigError
from dapo.processes import python_command, python_environment

if TYPE_CHECKING:
    from dapo.bench.rollout_workloads import RolloutLoad, RolloutResult

ENGINES = ("local", "local-exact", "local-fp8", "plain", "vllm", "transformers")
ON_CUDA = ("local-exact", "local-fp8")


def bench_rollout(
    shape: Annotated[str, typer.Option(help="Random weights of this size: 135m, 0.5b, qwen3-0.6b, 1.5b or 7b.")] = "",
    model: Annotated[str, typer.Option(help="A model folder instead.")] = "",
    load: Annotated[
        str,
        typer.Option(
            help="fixed (512 tokens each), closed (log-normal, to the last), open (slots refilled), few (8 at a time), "
            "mixed (256 prompts and responses of 100 to 1,024 tokens)."
        ),
    ] = "fixed",
    engines: Annotated[
        str,
        typer.Option(
            help="Of local, local-exact (rollout.exact), local-fp8 (rollout.quantization), plain, vllm, transformers."
        ),
    ] = "",
    slots: Annotated[int, typer.Option(min=0, help="Responses at a time; 0: 1024 on a GPU, else 16.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each response of the fixed load.")] = 512,
    tokens_per_tick: Annotated[
        int, typer.Option(min=0, help="Tokens between two looks of the host; 0: by device.")
    ] = 0,
    page_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a page of the KV cache; 0: by device.")] = 0,
    draft: Annotated[int, typer.Option(min=0, help="Tokens that our engines draft while at most 8 responses run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """Generate responses with their log-probs: tokens per second, and the fraction of what the GPU allows.

    Works as pasted:  dapo bench rollout --shape 135m --slots 16 --new-tokens 32
    """
    import torch

    from dapo.bench.rollout_workloads import Kind, make_load
    from dapo.rollout.local.float8 import FLOAT8_CAPABILITY

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = engines.split(",") if engines else [name for name in ENGINES if is_here(name, device)]
    unknown = [name for name in wanted if name not in ENGINES]
    if unknown:
        raise ConfigError(f"--engines {engines}: no engine {unknown[0]}.", remedy=f"Choose from {', '.join(ENGINES)}.")
    if device != "cuda" and (named := [name for name in wanted if name in ON_CUDA]):
        raise ConfigError(f"--engines {named[0]}: is for CUDA.", remedy="Leave it out.")
    if "local-fp8" in wanted and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        raise ConfigError("--engines local-fp8: this GPU has no products in FP8.", remedy="Leave it out.")
    kinds = load.split(",")
    if set(kinds) - set(get_args(Kind)):
        raise ConfigError(f"--load {load}: unknown.", remedy=f"Choose from {', '.join(get_args(Kind))}.")
    setting = BenchSetup(choose_shape(shape or ("1.5b" if device == "cuda" else "135m"), model), model, device)
    full = slots or (1024 if device == "cuda" else 16)
    loads = [make_load(k, slots=8 if k == "few" else full, new_tokens=new_tokens) for k in kinds]  # type: ignore[arg-type]
    rows = []
    for name in wanted:
        rows += measure(name, setting, loads, tokens_per_tick or None, page_tokens or None, draft)
    figures = {"setting": setting.describe(), "results": rows}
    typer.echo(json.dumps(figures)) if as_json else show(figures)


def is_here(name: str, device: str) -> bool:
    """Whether an engine runs where none is named."""
    if name == "vllm":
        return importlib.util.find_spec("vllm") is not None
    return name not in ON_CUDA and not (name == "plain" and device == "cuda")


def measure(
    name: str,
    setting: BenchSetup,
    loads: list[RolloutLoad],
    tokens_per_tick: int | None,
    page_tokens: int | None,
    draft: int,
) -> list[dict[str, Any]]:
    """One engine on every load, after a short warm-up."""
    results: list[tuple[RolloutResult | None, str]]
    match name:
        case "local" | "local-exact" | "local-fp8" | "plain":
            results = ours(name, setting, loads, tokens_per_tick, page_tokens, draft)
        case "vllm":
            results = vllm(setting, loads)
        case _:
            results = transformers(setting, loads)
    return [row(name, setting, load, result, text) for load, (result, text) in zip(loads, results, strict=True)]


def row(name: str, setting: BenchSetup, load: RolloutLoad, result: RolloutResult | None, text: str) -> dict[str, Any]:
    from dapo.bench.rollout_workloads import least_seconds

    line: dict[str, Any] = {"engine": name, "load": load.kind, "slots": load.slots, "responses": load.n_responses}
    if result is None:
        return {**line, "settings": text}
    limit = LIMITS.get(setting.describe()["device"])
    line |= {
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "ms_per_step": 1e3 * result.seconds * min(load.slots, load.n_responses) / result.tokens,
        "settings": text,
    }
    if limit:
        line["fraction_of_limit"] = least_seconds(setting.shape, load, *limit) / result.seconds
    return line


def ours(
    name: str,
    setting: BenchSetup,
    loads: list[RolloutLoad],
    tokens_per_tick: int | None,
    page_tokens: int | None,
    draft: int,
) -> list[tuple[RolloutResult | None, str]]:
    import torch

    from dapo.bench.rollout_workloads import drive
    from dapo.models.packed_attention import PACKED_ATTENTION
    from dapo.models.policy import Policy
    from dapo.rollout.draft import Drafting
    from dapo.rollout.engine import SamplingParams
    from dapo.rollout.local.engine import LocalEngine
    from dapo.rollout.plain.engine import PlainEngine

    policy = Policy(setting.model(PACKED_ATTENTION), None).eval()
    policy.eos_ids = ()
    synchronise = torch.cuda.synchronize if setting.device == "cuda" else lambda: None
    results: list[tuple[RolloutResult | None, str]] = []
    for load in loads:
        longest = load.longest
        sizes: dict[str, Any] = {"sampling": SamplingParams(), "max_concurrent": load.slots, "max_tokens": longest}
        sizes["drafting"] = Drafting(draft)
        engine: LocalEngine | PlainEngine
        if name != "plain":
            engine = LocalEngine(
                policy,
                **sizes,
                tokens_per_tick=tokens_per_tick,
                page_tokens=page_tokens,
                is_exact=name == "local-exact",
                is_float8=name == "local-fp8",
            )
            text = f"bf16 pages of {engine.page_tokens} tokens" if setting.device == "cuda" else "pages"
            text += f", {engine.tokens_per_tick} tokens a tick, log-probs"
        else:
            engine = PlainEngine(policy, **sizes)
            text = "dense cache, log-probs"
        # Capturing a graph, choosing a matrix algorithm: once per batch size in a run of thousands of steps.
        warm_up(engine, load, setting.shape.vocabulary)
        if draft:  # passes over drafts have sizes of their own
            drive(engine, load, load.requests(setting.shape.vocabulary, seed=1), synchronise)
            engine.take_drafted()
        result = drive(engine, load, load.requests(setting.shape.vocabulary), synchronise)
        if draft:
            drafted, accepted = engine.take_drafted()
            text += f", drafts of {draft}: {accepted:,} of {drafted:,} drafted tokens accepted"
        results.append((result, text))
        del engine
        free_memory()
    return results


def warm_up(engine: Any, load: RolloutLoad, vocabulary: int) -> None:
    """Every batch size that the load will pass through, a few tokens each."""
    requests = load.requests(vocabulary, seed=1, limit=40)[: load.slots]
    sizes = [len(requests)]
    if load.kind in ("closed", "mixed"):
        while sizes[-1] > 1:
            sizes.append(max(1, sizes[-1] * 4 // 5))
    for n in sizes:
        engine.submit(requests[:n])
        engine.advance()
        engine.abort([request.id for request in requests])


def vllm(setting: BenchSetup, loads: list[RolloutLoad]) -> list[tuple[RolloutResult | None, str]]:
    """vLLM at its best setting for this load, in a process of its own: it takes the card's memory and keeps it."""
    from dapo.bench.rollout_workloads import RolloutResult

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        setting.save_shape(work)
        plan = [
            {
                "kind": load.kind,
                "slots": load.slots,
                "requests": [[r.group, r.max_new_tokens] for r in load.requests(setting.shape.vocabulary)],
                "prompts": load.prompt_lengths,
            }
            for load in loads
        ]
        (work / "plan.json").write_text(json.dumps({"model": setting.folder, "loads": plan}), encoding="utf-8")
        command = python_command("-m", "dapo.bench.vllm_peer", str(work))
        environment = {**python_environment(), "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"vllm"')]
    if len(lines) != len(loads):
        said = done.stderr.strip().splitlines() or ["no output"]
        sys.stderr.write("".join(f"vllm: {line}\n" for line in said[-40:]))
        reason = said[-1]
        return [(None, f"did not run: {reason}")] * len(loads)
    return [(RolloutResult(line["seconds"], line["tokens"], 0), line["settings"]) for line in lines]


def transformers(setting: BenchSetup, loads: list[RolloutLoad]) -> list[tuple[RolloutResult | None, str]]:
    """`generate` of Hugging Face: left-padded batches of 256 rows, each until its longest response ends."""
    import torch

    from dapo.bench.rollout_workloads import RolloutResult

    model = setting.model("sdpa").eval()
    results: list[tuple[RolloutResult | None, str]] = []
    for load in loads:
        rows = min(256, load.slots)
        text = f"generate, SDPA, batches of {rows}, no log-probs"
        if load.kind != "fixed":
            results.append((None, "only the fixed load is run: it has no continuous batching"))
            continue
        requests = load.requests(setting.shape.vocabulary)[:rows]
        ids = torch.tensor([request.prompt for request in requests], device=setting.device)
        new = requests[0].max_new_tokens
        for length in (4, new):
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=length,
                    min_new_tokens=length, pad_token_id=0,
                )  # fmt: skip
            if setting.device == "cuda":
                torch.cuda.synchronize()
        results.append((RolloutResult(time.perf_counter() - start, rows * new, new), text))
    del model
    free_memory()
    return results


def show(figures: dict[str, Any]) -> None:
    setting = figures["setting"]
    console = wide_console()
    console.print(
        f"{setting['parameters'] / 1e6:,.0f} M parameters ({setting['model']}), {setting['dtype']}, {setting['device']}"
    )
    table = table_of("engine", "load", "slots", "tokens/s", "ms per step", "of limit", "settings", figures=slice(2, 6))
    for line in figures["results"]:
        if "tokens_per_s" not in line:
            table.add_row(line["engine"], line["load"], str(line["slots"]), "", "", "", line["settings"])
            continue
        fraction = line.get("fraction_of_limit")
        table.add_row(
            line["engine"], line["load"], str(line["slots"]), f"{line['tokens_per_s']:,.0f}",
            f"{line['ms_per_step']:.2f}", "" if fraction is None else f"{fraction:.0%}", line["settings"],
        )  # fmt: skip
    console.print(table)
