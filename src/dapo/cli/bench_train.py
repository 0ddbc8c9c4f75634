"""`dapo bench train`: a training pass of this project beside plain Hugging Face, on the same loads in one run."""

from __future__ import annotations

import gc
import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dapo.cli.console import Pipe
from dapo.config.model_shapes import BENCH_SHAPES, ModelShape, shape_of
from dapo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from dapo.distributed.world import World
    from dapo.models.policy import Policy

LIMIT_FLOPS = {"NVIDIA H200": 790e12}  # dense bf16 products that this card sustains
LOG_NORMAL = {"mu": 6.4, "sigma": 0.9}
CUDA_LOADS = "8x1024,2x4096c,1x16384c,lognormal:64:8192"
CPU_LOADS = "4x128,2x256c,lognormal:16:512"


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of one update; `is_checkpointed` recomputes activations on both sides."""

    name: str
    lengths: tuple[int, ...]
    is_checkpointed: bool = False
    is_uneven: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float  # per update: forward, backward and optimizer
    peak_gib: float
    settings: str


def bench_train(
    shape: Annotated[str, typer.Option(help="Random weights of this size: 135m, 0.5b, 1.5b or 7b.")] = "",
    model: Annotated[str, typer.Option(help="A model folder instead.")] = "",
    loads: Annotated[
        str, typer.Option(help="ROWSxTOKENS (c: checkpointed) and lognormal:ROWS:CAP, with commas between.")
    ] = "",
    sides: Annotated[str, typer.Option(help="Of dapo, dapo-plain, dapo-fsdp2, hf-masters and hf-bf16.")] = "",
    preset: Annotated[str, typer.Option(help="Presets whose update is compared, such as ppo,grpo.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Updates that are timed, after two that are not.")] = 4,
    moments: Annotated[str, typer.Option(help="AdamW's moments of this project: float32, int8 or host.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """Forward, backward and AdamW: tokens per second and peak memory, beside Hugging Face with SDPA.

    Works as pasted:  dapo bench train --shape 135m
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose_shape(shape or ("1.5b" if device == "cuda" else "135m"), model)
    wanted = sides or ("dapo,dapo-plain,hf-masters,hf-bf16" if device == "cuda" else "dapo,hf-masters")
    unknown = [name for name in wanted.split(",") if name not in SIDES]
    if unknown:
        raise ConfigError(f"--sides {sides}: no side {unknown[0]}.", remedy=f"Choose of {', '.join(SIDES)}.")
    if moments not in ("float32", "int8", "host"):
        raise ConfigError(f"--moments {moments}: unknown.", remedy="Use float32, int8 or host.")
    setting = Setting(chosen, model, device, repeats, moments)
    if preset:
        from dapo.cli.bench_presets import compare_presets, show_presets

        figures = compare_presets(setting, preset.split(","))
        typer.echo(json.dumps(figures)) if as_json else show_presets(figures)
        return
    parsed = [parse_load(text) for text in (loads or (CUDA_LOADS if device == "cuda" else CPU_LOADS)).split(",")]
    figures = {"setting": setting.describe(), "loads": [measure(setting, load, wanted.split(",")) for load in parsed]}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show(figures)


def choose_shape(name: str, folder: str) -> ModelShape:
    found = shape_of(folder) if folder else BENCH_SHAPES.get(name)
    if found is None:
        what = f"--model {folder}: has no config.json of a known kind." if folder else f"--shape {name}: unknown."
        raise ConfigError(what, remedy=f"Use --shape {', '.join(BENCH_SHAPES)}, or --model with a model's folder.")
    return found


def parse_load(text: str) -> Load:
    """ "8x1024", "1x16384c" or "lognormal:64:8192"; lengths of the last are the same every time."""
    uneven = re.fullmatch(r"lognormal:(\d+):(\d+)", text)
    if uneven:
        import numpy as np

        rows, cap = int(uneven[1]), int(uneven[2])
        drawn = np.random.default_rng(0).lognormal(LOG_NORMAL["mu"], LOG_NORMAL["sigma"], rows)
        return Load(text, tuple(int(n) for n in np.clip(drawn, 2, cap)), is_uneven=True)
    even = re.fullmatch(r"(\d+)x(\d+)(c?)", text)
    if even is None or int(even[2]) < 2 or int(even[1]) < 1:
        raise ConfigError(f"--loads {text}: cannot be read.", remedy="Write 8x1024, 1x16384c or lognormal:64:8192.")
    return Load(text, (int(even[2]),) * int(even[1]), is_checkpointed=even[3] == "c")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all sides have in common."""

    shape: ModelShape
    folder: str
    device: str
    repeats: int
    moments: str

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def model(self, attention: str) -> Any:
        """A fresh model on the device: the folder's, or one of the shape with random weights."""
        if self.folder:
            from transformers import AutoModelForCausalLM

            from dapo.models.load import load_pretrained

            if attention == "sdpa":
                model: Any = AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=self.dtype, attn_implementation="sdpa"
                )
                return model.to(self.device)
            return load_pretrained(
                AutoModelForCausalLM, self.folder, dtype=self.dtype, device=self.device, revision=None
            )
        from dapo.models.random_model import random_model

        return random_model(self.shape, dtype=self.dtype, device=self.device, attention=attention)

    def save_shape(self, folder: Path) -> None:
        """A config.json of the shape, for a peer that makes random weights itself."""
        from dapo.models.random_model import random_config

        config = random_config(self.shape)
        config.architectures = ["Qwen2ForCausalLM" if self.shape.has_qkv_bias else "LlamaForCausalLM"]
        config.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        import torch

        name = torch.cuda.get_device_name() if self.device == "cuda" else f"{platform.machine()} CPU"
        return {
            "model": self.folder or "random weights",
            "parameters": self.shape.parameters,
            "device": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "limit_flops": LIMIT_FLOPS.get(name),
            "versions": {package: version_of(package) for package in ("dapo", "torch", "transformers")},
        }


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout, without installation
        return "source"


# ------------------------------------------------------------------ measuring


def measure(setting: Setting, load: Load, sides: Sequence[str]) -> dict[str, Any]:
    """Every side on one load, one after the other, each on a model of its own."""
    from dapo.models.random_model import training_flops

    flops = training_flops(setting.shape, list(load.lengths))
    limit = setting.describe()["limit_flops"]
    rows: dict[str, Any] = {}
    for name in sides:
        result = SIDES[name](setting, load)
        if result is None:
            rows[name] = None
            continue
        rows[name] = {
            "ms": 1e3 * result.seconds,
            "tokens_per_s": load.tokens / result.seconds,
            "peak_gib": result.peak_gib,
            "fraction_of_limit": flops / result.seconds / limit if limit else None,
            "settings": result.settings,
        }
    plain, sharded = rows.get("dapo"), rows.get("dapo-fsdp2")
    if plain and sharded:
        sharded["time_over_dapo"] = sharded["ms"] / plain["ms"]
    for name in ("hf-masters", "hf-bf16"):
        theirs = rows.get(name)
        for row in rows.values():
            if theirs and row:
                row[f"speed_over_{name}"] = row["tokens_per_s"] / theirs["tokens_per_s"]
                row[f"memory_of_{name}"] = row["peak_gib"] / theirs["peak_gib"] if theirs["peak_gib"] else None
    return {"load": load.name, "tokens": load.tokens, "longest": max(load.lengths), "sides": rows}


def timed(setting: Setting, update: Callable[[], None]) -> tuple[float, float]:
    """(seconds per update, peak GiB), after two updates that fill caches and compile kernels."""
    import torch

    is_cuda = setting.device == "cuda"
    for _ in range(2 if is_cuda else 1):
        update()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(setting.repeats):
        update()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / setting.repeats
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sequences(setting: Setting, load: Load) -> list[list[int]]:
    import numpy as np

    generator = np.random.default_rng(1)
    return [generator.integers(3, setting.shape.vocabulary, n).tolist() for n in load.lengths]


def dapo_side(setting: Setting, load: Load, *, is_fused: bool = True) -> Result | None:
    """This project: packed, log-probs without the whole logits, float32 masters; budget and kernels as in a run."""
    from dapo.distributed.world import ALONE

    kernels = "fused kernels" if is_fused and setting.device == "cuda" else "plain"
    return dapo_run(setting, load, make_policy(setting, is_fused=is_fused), ALONE, kernels)


def make_policy(setting: Setting, *, is_fused: bool) -> Policy:
    from dapo.models.fused_layers import fuse_layers
    from dapo.models.packed_attention import PACKED_ATTENTION
    from dapo.models.policy import Policy

    free_memory()
    policy = Policy(setting.model(PACKED_ATTENTION), None).eval()
    policy.is_fused = is_fused
    if is_fused:
        fuse_layers(policy.backbone)
    return policy


def dapo_run(setting: Setting, load: Load, policy: Policy, world: World, how: str) -> Result | None:
    """Updates of this policy, which is whole, or sharded over the ranks of this world."""
    import torch

    from dapo.models.packing import pack
    from dapo.trainer.activations import checkpoint_layers
    from dapo.trainer.optimizer import Optimizer

    if load.is_checkpointed:
        checkpoint_layers(policy)
    optimizer = Optimizer(
        policy.named_parameters(),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        grad_clip=1.0,
        moments=setting.moments,  # type: ignore[arg-type]
        world=world,
    )
    budget = max(16384 if setting.device == "cuda" else 1024, max(load.lengths))
    batches = []
    rows: list[list[int]] = []
    for row in sequences(setting, load):
        if rows and sum(map(len, rows)) + len(row) > budget:
            batches.append(rows)
            rows = []
        rows.append(row)
    batches.append(rows)
    packs = [pack([row[:1] for row in rows], [row[1:] for row in rows], setting.device) for rows in batches]
    total = sum(packed.n_targets for packed in packs)

    def update() -> None:
        for packed in packs:
            logp, _ = policy(packed, temperature=1.0)
            ((logp.exp() * 0.1).sum() / total).backward()
        optimizer.step(1e-6)

    settings = (
        f"packed, {len(packs)} micro-batches of {budget:,} tokens, float32 masters, moments {setting.moments}, {how}"
    )
    try:
        seconds, peak = timed(setting, update)
    except torch.OutOfMemoryError:
        return None
    return Result(seconds, peak, settings)


def plain_side(setting: Setting, load: Load) -> Result | None:
    """This project without its kernels."""
    return dapo_side(setting, load, is_fused=False)


def fsdp2_side(setting: Setting, load: Load) -> Result | None:
    """This project as a run with cluster.shard = full on one rank: FSDP2, and a whole copy for the engine.

    The copy is refreshed once a step, not once an update: its time is named apart.
    """
    from dapo.distributed.shards import Sharding, refresh
    from dapo.distributed.world import one_rank
    from dapo.trainer.learner import layers_of

    policy = make_policy(setting, is_fused=True)
    with one_rank(setting.device) as world:
        sharded = Sharding(world, setting.device, setting.dtype).copy_of(policy, layers_of)
        result = dapo_run(setting, load, sharded, world, "FSDP2 on one rank")
        if result is None:
            return None
        refresh_s, _ = timed(setting, lambda: refresh(policy, sharded))
    return replace(result, settings=f"{result.settings}; refreshing the engine's copy {1e3 * refresh_s:.1f} ms a step")


def hf_side(setting: Setting, load: Load, *, has_masters: bool) -> Result | None:
    """Plain Hugging Face: SDPA, log-softmax of float32 logits, fused AdamW.

    Uneven rows are padded, in their order, with the rows per batch and the checkpointing that are fastest of what fits.
    """
    if not load.is_uneven:
        return hf_run(setting, load, len(load.lengths), load.is_checkpointed, has_masters)
    tried = [
        hf_run(setting, load, rows, is_checkpointed, has_masters)
        for rows, is_checkpointed in ((8, True), (4, True), (4, False), (2, False))
    ]
    fits = [result for result in tried if result is not None]
    return min(fits, key=lambda result: result.seconds) if fits else None


def hf_masters_side(setting: Setting, load: Load) -> Result | None:
    return hf_side(setting, load, has_masters=True)


def hf_bf16_side(setting: Setting, load: Load) -> Result | None:
    return hf_side(setting, load, has_masters=False)


def hf_run(setting: Setting, load: Load, rows: int, is_checkpointed: bool, has_masters: bool) -> Result | None:
    import torch

    free_memory()
    model = setting.model("sdpa").train()
    model.config.use_cache = False
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = list(model.parameters())
    is_copied = has_masters and setting.dtype == torch.bfloat16
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters] if is_copied else parameters
    adam = torch.optim.AdamW(masters, lr=1e-6, fused=setting.device == "cuda")
    batches = [pad(batch, setting.device) for batch in batched(sequences(setting, load), rows)]
    total = sum(load.lengths) - len(load.lengths)

    def update() -> None:
        for ids, mask in batches:
            # Without padding no mask is given, which lets SDPA choose its fastest kernel.
            logits = model(input_ids=ids, attention_mask=None if bool(mask.all()) else mask).logits[:, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
            ((logp.exp() * 0.1 * mask[:, 1:]).sum() / total).backward()
        if is_copied:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if is_copied:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)

    settings = f"SDPA, {len(batches)} batches of {rows} rows, " + ("float32 masters" if has_masters else "bf16 only")
    settings += ", checkpointed" if is_checkpointed else ""
    try:
        seconds, peak = timed(setting, update)
    except torch.OutOfMemoryError:
        return None
    return Result(seconds, peak, settings)


def batched(rows: list[list[int]], n: int) -> list[list[list[int]]]:
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def pad(rows: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) [B, T], padded at the end to the longest row."""
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return ids, mask


SIDES: dict[str, Callable[[Setting, Load], Result | None]] = {
    "dapo": dapo_side,
    "dapo-plain": plain_side,
    "dapo-fsdp2": fsdp2_side,
    "hf-masters": hf_masters_side,
    "hf-bf16": hf_bf16_side,
}


# ------------------------------------------------------------------ showing


def show(figures: dict[str, Any]) -> None:
    setting = figures["setting"]
    console = Pipe(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 180  # a file has no edge: rows stay whole
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    console.print(
        f"{setting['parameters'] / 1e6:,.0f} M parameters ({setting['model']}), {setting['dtype']}, {setting['device']}"
    )
    table = Table("load", "side", "ms", "tokens/s", "GiB", "of limit", "speed", "memory", "settings", box=None)
    for column in list(table.columns)[2:8]:
        column.justify = "right"
    for load in figures["loads"]:
        for name, row in load["sides"].items():
            if row is None:
                table.add_row(load["load"], name, "out of memory")
                continue
            fraction, memory = row["fraction_of_limit"], row.get("memory_of_hf-masters")
            table.add_row(
                load["load"],
                name,
                f"{row['ms']:,.0f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['peak_gib']:.1f}",
                "" if fraction is None else f"{fraction:.0%}",
                f"{row['speed_over_hf-masters']:.2f}x" if "speed_over_hf-masters" in row else "",
                "" if memory is None else f"{memory:.0%}",
                row["settings"],
            )
    console.print(table)
    for load in figures["loads"]:
        if over := (load["sides"].get("dapo-fsdp2") or {}).get("time_over_dapo"):
            console.print(
                f"{load['load']}: an update by FSDP2 on one rank takes {over:.3f} times the plain path's time."
            )
    console.print(f"speed and memory: over and of hf-masters, which has the same optimizer precision. {versions}")
