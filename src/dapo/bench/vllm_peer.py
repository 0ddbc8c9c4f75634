"""vLLM as a peer in `dapo bench rollout`: its own offline interface at its best setting, in a process of its own.

Usage: python -m dapo.bench.vllm_peer FOLDER, with config.json and plan.json there; one JSON line per load.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import vllm

    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    slots = max(load["slots"] for load in plan["loads"])
    longest = max(load["prompts"][group] + n for load in plan["loads"] for group, n in load["requests"])
    model: dict[str, Any] = {"model": plan["model"] or str(folder)}
    if not plan["model"]:
        model |= {"load_format": "dummy", "skip_tokenizer_init": True}
    engine = vllm.LLM(
        **model,
        dtype="bfloat16",
        max_model_len=longest + 1,
        gpu_memory_utilization=0.85,
        max_num_seqs=slots,
        enable_prefix_caching=True,
        disable_log_stats=True,
        # Its own default, 512, halves its speed at 1,024 sequences.
        compilation_config={"max_cudagraph_capture_size": slots},
    )
    settings = f"vLLM {vllm.__version__}, CUDA graphs up to {slots}, prefix caching, log-probs"
    for load in plan["loads"]:
        run(engine, vllm, load, limit=16)
        seconds, tokens = run(engine, vllm, load)
        print(json.dumps({"vllm": vllm.__version__, "seconds": seconds, "tokens": tokens, "settings": settings}))


def run(engine: Any, vllm: Any, load: dict[str, Any], limit: int | None = None) -> tuple[float, int]:
    generator = np.random.default_rng(0 if limit is None else 1)
    prompts = [generator.integers(3, 40_000, n).tolist() for n in load["prompts"]]
    inputs = [{"prompt_token_ids": prompts[group]} for group, _ in load["requests"]]
    params = [
        vllm.SamplingParams(
            temperature=1.0, max_tokens=min(n, limit or n), ignore_eos=True, detokenize=False, logprobs=0
        )
        for _, n in load["requests"]
    ]
    start = time.perf_counter()
    outputs = engine.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
