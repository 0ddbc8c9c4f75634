"""The policy: a Hugging Face causal LM, asked for the log-probs of given responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dapo.errors import ConfigError, EngineError
from dapo.models.adapter import compact
from dapo.models.dropout import AdapterDropout, Draw
from dapo.models.logprobs import ExactHead, linear_logprobs
from dapo.models.packed_attention import packed_hidden
from dapo.models.packing import Packed


class ExactForward(ExactHead, Protocol):
    """An engine's pass over a packed batch, in place of the model's own."""

    def hidden(self, packed: Packed) -> Tensor:
        """What `packed_hidden` computes."""
        ...


class Policy(nn.Module):
    """π_θ with its tokenizer. The parameters are the trainer's; the local engine decodes on the same tensors."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = end_tokens(model, tokenizer)
        self.is_fused = True  # kernels over the logits, where this device has them
        self.draw: Draw | None = None  # with dropout in an adapter
        self.exact: ExactForward | None = None  # log-probs are the engine's, to the last bit

    @property
    def base(self) -> Any:
        """The causal LM itself, under an adapter's wrapper if there is one."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def backbone(self) -> Any:
        """The transformer without its output head."""
        return self.base.get_decoder()

    @property
    def head(self) -> Any:
        """The output head; with tied embeddings its weight is the embedding's."""
        return self.base.get_output_embeddings()

    @property
    def config(self) -> Any:
        return self.base.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def recomputes(self) -> bool:
        """Some layers make their activations again in the backward pass; those of an exact one always do."""
        backbone = self.backbone
        return self.exact is not None or any(
            getattr(part, "gradient_checkpointing", False) for part in (backbone, *getattr(backbone, "layers", ()))
        )

    def forward(
        self, packed: Packed, *, temperature: float, with_entropy: bool = True, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """log π_θ(o_t | q, o_<t) at `temperature` and the entropy there, for all response tokens: two tensors [N].

        Both are float32 at least: the head's product and its softmax are, whatever the weights are in. The entropy
        carries a gradient only with `entropy_gradient`. All of it, the head's product included, happens inside this
        forward, so that hooks which gather sharded parameters have run.
        """
        if self.draw is not None:
            self.draw.tokens = packed.input_ids, packed.position_ids
        whole = packed_hidden(self.backbone, packed) if self.exact is None else self.exact.hidden(packed)
        hidden = packed.states(whole)  # [N, H]
        return linear_logprobs(
            hidden,
            self.head.weight,
            packed.targets,
            temperature=temperature,
            bias=getattr(self.head, "bias", None),
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            is_short_of_memory=self.recomputes,
            is_fused=None if self.is_fused else False,
            exact=self.exact,
        )


class WithoutAdapter(Policy):
    """The frozen model under a policy's adapter, as a policy of its own: the same tensors, nothing is kept twice."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.tokenizer)
        self.is_fused = policy.is_fused

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with self.model.disable_adapter():
            return super().forward(*args, **kwargs)


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: those of the generation config and the tokenizer's own, sorted."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(declared if isinstance(declared, (list, tuple)) else [declared])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted(i for i in ids if i is not None))


def add_lora(
    policy: Policy,
    rank: int,
    alpha: float,
    *,
    target_modules: Sequence[str] = (),
    rank_stabilized: bool = False,
    dropout: float = 0.0,
) -> Policy:
    """Freeze the policy's weights and add a low-rank adapter, W + s·BA with s = α/r, or α/√r where rank-stabilized.

    To every linear layer but the head, or to those whose names end in one of `target_modules`; changed in place. With
    `dropout` BA reads an x of which a share is set to 0, within `dropping`.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise EngineError(
            f"model.lora.rank = {rank}: a low-rank adapter needs the package peft, which is not installed.",
            remedy='Install it with: pip install "dapo[lora]", or set model.lora.rank=0 to train all weights.',
        ) from error
    linear = {
        name.rpartition(".")[2]
        for name, module in policy.base.named_modules()
        if isinstance(module, nn.Linear) and module is not policy.head
    }
    if unknown := [name for name in target_modules if name not in linear]:
        raise ConfigError(
            f"model.lora.target_modules: {unknown[0]}: the model has no linear layer of that name.",
            remedy=f"Use some of {', '.join(sorted(linear))}, or leave it out for all but the head.",
        )
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules) or "all-linear",
        use_rslora=rank_stabilized,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
    )
    policy.model = get_peft_model(policy.model, lora)
    compact(policy.model)
    if dropout:
        policy.draw = Draw()
        for name, module in policy.base.named_modules():
            if hasattr(module, "lora_dropout"):  # peft's own would depend on the order of passes
                module.lora_dropout["default"] = AdapterDropout(dropout, name, policy.draw)
    return policy
