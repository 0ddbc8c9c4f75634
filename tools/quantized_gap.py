"""How far quantized weights move a model's log-probs of its own responses.

python tools/quantized_gap.py MODEL PROBLEMS.jsonl --responses FILE.jsonl > FOUND.json

The model, as it is, answers the first problems at temperature 1; FILE keeps what it wrote, and is read where it is
there already. Then the log-probs of those tokens, with the weights as they are and in 8 and 4 bits. The standard error
is that over problems.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from dapo.data.problems import load_problems
from dapo.data.prompts import TEMPLATES, PromptFormat
from dapo.models.load import load_policy
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.models.quantized import Kind
from dapo.rollout.engine import Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.noise import NoiseKey


@dataclass(frozen=True)
class Written:
    """A response of the model, in tokens."""

    problem: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]


def write_responses(
    policy: Policy, problems: str, template: str, n_problems: int, per_problem: int, limit: int
) -> list[Written]:
    chosen = load_problems(problems).problems[:n_problems]
    prompts = [PromptFormat(template).encode(problem, policy.tokenizer) for problem in chosen]
    requests = [
        Request(g * per_problem + i, prompt, NoiseKey(0, "gap", problem.id, 0, i), limit, group=g)
        for g, (problem, prompt) in enumerate(zip(chosen, prompts, strict=True))
        for i in range(per_problem)
    ]
    engine = LocalEngine(
        policy, sampling=SamplingParams(), max_concurrent=len(requests), max_tokens=limit + max(map(len, prompts))
    )
    engine.submit(requests)
    written: dict[int, Written] = {}
    while engine.n_in_flight or engine.n_waiting:
        for request, completion in engine.advance():
            tokens = tuple(int(token) for token in completion.tokens)
            written[request.id] = Written(chosen[request.group].id, request.prompt, tokens)
    return [written[i] for i in sorted(written)]


@torch.no_grad()
def logps(policy: Policy, written: Sequence[Written]) -> list[Tensor]:
    """The log-prob of every token, in float64; a tensor for each response."""
    found = []
    for one in written:
        packed = pack([one.prompt], [one.response], policy.device)
        found.append(policy(packed, temperature=1.0, with_entropy=False)[0].double().cpu())
    return found


def gap(written: Sequence[Written], base: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, float]:
    """Mean |Δ log p| and KL (k3) per token; the error is that of a ratio of means over problems."""
    problems = sorted({one.problem for one in written})
    sums = torch.zeros(len(problems), 3, dtype=torch.float64)
    for one, b, o in zip(written, base, other, strict=True):
        log_ratio = o - b
        row = log_ratio.abs().sum(), (log_ratio.exp() - 1 - log_ratio).sum(), torch.tensor(float(len(b)))
        sums[problems.index(one.problem)] += torch.stack([value.double() for value in row])
    moved, k3, tokens = sums.sum(0).tolist()
    rest = sums[:, 0] - moved / tokens * sums[:, 2]
    n = len(problems)
    return {
        "mean_abs_delta_logp": moved / tokens,
        "standard_error": float((rest.square().sum() * n / max(n - 1, 1)).sqrt()) / tokens,
        "k3": k3 / tokens,
        "tokens": int(tokens),
        "mean_logp": float(torch.cat(list(base)).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("problems", help="questions and answers, as for data.train")
    parser.add_argument("--responses", type=Path, required=True, help="read where it is there, else written")
    parser.add_argument("--n-problems", type=int, default=16)
    parser.add_argument("--per-problem", type=int, default=1)
    parser.add_argument("--max-response-tokens", type=int, default=512)
    parser.add_argument("--template", default="boxed", choices=TEMPLATES)
    parser.add_argument("--kinds", nargs="+", default=get_args(Kind), choices=get_args(Kind))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()

    dtype = getattr(torch, given.dtype)
    policy = load_policy(given.model, dtype=dtype, device=given.device)
    if not given.responses.exists():
        sizes = given.n_problems, given.per_problem, given.max_response_tokens
        lines = [json.dumps(asdict(one)) for one in write_responses(policy, given.problems, given.template, *sizes)]
        given.responses.write_text("\n".join(lines) + "\n")
    rows = [json.loads(line) for line in given.responses.read_text().splitlines()]
    written = [Written(row["problem"], tuple(row["prompt"]), tuple(row["response"])) for row in rows]
    base = logps(policy, written)
    found = {}
    for kind in given.kinds:
        del policy  # one at a time
        began = time.perf_counter()
        policy = load_policy(given.model, dtype=dtype, device=given.device, quantization=kind)
        loaded = time.perf_counter()
        found[kind] = gap(written, base, logps(policy, written)) | {"load_s": loaded - began}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
