"""The policy: a Hugging Face causal LM, asked for the log-probs of given responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dapo.errors import EngineError
from dapo.models.logprobs import linear_logprobs
from dapo.models.packed_attention import packed_hidden
from dapo.models.packing import Packed


class Policy(nn.Module):
    """π_θ with its tokenizer. The parameters are the trainer's; the local engine decodes on the same tensors."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = end_tokens(model, tokenizer)
        self.is_fused = True  # kernels over the logits, where this device has them

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

    def forward(
        self, packed: Packed, *, temperature: float, with_entropy: bool = True, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """log π_θ(o_t | q, o_<t) at `temperature` and the entropy there, for all response tokens: two tensors [N].

        Both are float32 at least: the head's product and its softmax are, whatever the weights are in. The entropy
        carries a gradient only with `entropy_gradient`. All of it, the head's product included, happens inside this
        forward, so that hooks which gather sharded parameters have run.
        """
        hidden = packed.states(packed_hidden(self.backbone, packed))  # [N, H]
        return linear_logprobs(
            hidden,
            self.head.weight,
            packed.targets,
            temperature=temperature,
            bias=getattr(self.head, "bias", None),
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            is_fused=None if self.is_fused else False,
        )


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: those of the generation config and the tokenizer's own, sorted."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(declared if isinstance(declared, (list, tuple)) else [declared])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted(i for i in ids if i is not None))


def add_lora(policy: Policy, rank: int, alpha: float) -> Policy:
    """Freeze the policy's weights and add a low-rank adapter to every linear layer but the head; changed in place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise EngineError(
            f"model.lora.rank = {rank}: a low-rank adapter needs the package peft, which is not installed.",
            remedy='Install it with: pip install "dapo[lora]", or set model.lora.rank=0 to train all weights.',
        ) from error
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    policy.model = get_peft_model(policy.model, lora)
    return policy
