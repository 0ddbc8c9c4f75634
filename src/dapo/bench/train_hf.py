"""The same training pass in plain Hugging Face: padded rows, whole logits, with float32 masters or in bf16 alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from dapo.bench.setting import TrainSetting
from dapo.bench.timing import Result, free_memory, measured
from dapo.bench.train_workloads import TrainLoad, sequences

if TYPE_CHECKING:
    import torch


def hf_side(setting: TrainSetting, load: TrainLoad, *, has_masters: bool) -> Result | None:
    """Plain Hugging Face: SDPA, log-softmax of float32 logits, fused AdamW.

    Uneven rows are padded, in their order, with the rows per batch and the checkpointing that are fastest of what fits;
    rows of one length on CUDA with the faster of SDPA's own choice and cuDNN.
    """
    if load.is_uneven:
        tried = [
            hf_run(setting, load, rows, is_checkpointed, has_masters)
            for rows, is_checkpointed in ((8, True), (4, True), (4, False), (2, False))
        ]
    else:
        tried = [
            hf_run(setting, load, len(load.lengths), load.is_checkpointed, has_masters, by_cudnn=by_cudnn)
            for by_cudnn in ((False, True) if setting.device == "cuda" else (False,))
        ]
    fits = [result for result in tried if result is not None]
    return min(fits, key=lambda result: result.seconds) if fits else None


def hf_masters_side(setting: TrainSetting, load: TrainLoad) -> Result | None:
    return hf_side(setting, load, has_masters=True)


def hf_bf16_side(setting: TrainSetting, load: TrainLoad) -> Result | None:
    return hf_side(setting, load, has_masters=False)


def hf_run(
    setting: TrainSetting,
    load: TrainLoad,
    rows: int,
    is_checkpointed: bool,
    has_masters: bool,
    *,
    by_cudnn: bool = False,
) -> Result | None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    free_memory()
    model = setting.model("sdpa").train()
    model.config.use_cache = False
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = list(model.parameters())
    is_copied = has_masters and setting.dtype == torch.bfloat16
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters] if is_copied else parameters
    adam = torch.optim.AdamW(masters, lr=1e-6, fused=setting.device == "cuda")
    batches = [pad(batch, setting.device) for batch in batched(sequences(load, setting.shape.vocabulary), rows)]
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

    kernel = "SDPA by cuDNN" if by_cudnn else "SDPA"
    settings = f"{kernel}, {len(batches)} batches of {rows} rows, " + (
        "float32 masters" if has_masters else "bf16 only"
    )
    settings += ", checkpointed" if is_checkpointed else ""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True) if by_cudnn else nullcontext():
        return measured(setting, update, settings)


def batched(rows: list[list[int]], n: int) -> list[list[list[int]]]:
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def pad(rows: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) [B, T], padded at the end to the longest row."""
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return ids, mask
