"""Whether vLLM computes with the weights it was given."""

from __future__ import annotations

import numpy as np
import torch

from dapo.errors import EngineError
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import NoiseKey, Request, SamplingParams
from dapo.rollout.vllm.core import VllmCore
from dapo.rollout.vllm.response import Response

# Mean distance of vLLM's log-probs from the policy's own, above which the weights did not arrive as they should.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def check_weights(core: VllmCore, policy: Policy, max_tokens: int) -> None:
    """Let vLLM generate a few tokens and compare log-probs; refuse a model whose weights it does not take over.

    A list of architectures would not do: which layers keep a packed copy that a reload does not update is vLLM's
    internal matter.
    """
    vocabulary = policy.config.get_text_config().vocab_size
    prompt = tuple((7 * i + 3) % vocabulary for i in range(min(5, max_tokens - 1)))
    key = NoiseKey(0, "eval", "check", 0, 0)
    item = Response(Request(-1, prompt, key, min(8, max_tokens - len(prompt)), 0), 0)
    core.add(item, SamplingParams(), ())
    is_finished = False
    while not is_finished:
        for new in core.step():
            item.tokens += new.tokens
            item.logp += new.logp
            is_finished = new.is_finished
    core.forget_prefixes()
    with torch.no_grad():
        packed = pack([prompt], [np.array(item.tokens)], policy.device)
        expected = policy(packed, temperature=1.0, with_entropy=False)[0].float().cpu().numpy()
    known = np.isfinite(expected)
    gap = np.abs(np.array(item.logp, np.float32) - expected)[known].mean() if known.any() else 0.0
    if not gap <= TOLERANCE[policy.dtype]:
        raise EngineError(
            f"rollout.engine = vllm: with this policy's weights, vLLM's {core.model_name} gives log-probs that "
            f"differ from the policy's own by {gap:.2g} on average; vLLM {core.release} on {core.device} cannot take "
            "over weights of this architecture.",
            remedy="Use engine local if it knows the architecture, or another version of vLLM.",
        )
