"""Pretrains the bundled toy model from a seed: `python -m dapo.quickstart.pretrain --out DIR --seed 0`.

Next-token prediction on the responses of `corpus`, a stream of fresh documents; no question of the evaluation side is
ever read. First the model goes to school, where every writer is careful and arithmetic is learned quickly; then it
reads writers with the habits it is to have. The same seed, thread count and machine give the same bytes. About six
minutes on one idle CPU core.
"""

import argparse
import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dapo.quickstart.corpus import CAREFUL, Habits, draw_document
from dapo.quickstart.muon import Muon
from dapo.quickstart.tokenizer import build_tokenizer

log = logging.getLogger(__name__)

REPORT_EVERY = 100
IGNORED = -100  # cross_entropy's mark for positions without a target


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of pretraining: linear warm-up, then cosine down to 0. Muon for matrices, AdamW for the rest."""

    steps: int
    matrix_lr: float
    other_lr: float
    warmup_steps: int = 50
    tokens_per_step: int = 1024
    documents_per_draw: int = 8192  # drawn together, so that documents of like length can share a batch


SCHOOL = Phase(steps=2500, matrix_lr=1e-2, other_lr=3e-3)
CORPUS = Phase(steps=1000, matrix_lr=3e-3, other_lr=1e-3)


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """0.45 M parameters: 1.8 MB in float32."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, habits: Habits, rng: random.Random, *, n_documents: int, tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (input [B, T], target [B, T]) of about `tokens` tokens; documents of like length share a batch."""
    while True:
        documents = _encode(tokenizer, [draw_document(habits, rng) for _ in range(n_documents)])
        documents.sort(key=lambda document: len(document[0]))
        batches: list[list[tuple[list[int], int]]] = [[]]
        for document in documents:
            if batches[-1] and (len(batches[-1]) + 1) * len(document[0]) > tokens:
                batches.append([])
            batches[-1].append(document)
        rng.shuffle(batches)
        for batch in batches:
            yield _collate(batch, pad=tokenizer.pad_token_id)


def _encode(tokenizer: PreTrainedTokenizerFast, documents: list[tuple[str, str, bool]]) -> list[tuple[list[int], int]]:
    """Token ids of each document, and how many of them are the question's."""
    questions, responses, has_end = zip(*documents, strict=True)
    prompts, answers = tokenizer(list(questions)).input_ids, tokenizer(list(responses)).input_ids
    ends = ([tokenizer.eos_token_id] if is_there else [] for is_there in has_end)
    return [(prompt + answer + end, len(prompt)) for prompt, answer, end in zip(prompts, answers, ends, strict=True)]


def _collate(batch: list[tuple[list[int], int]], *, pad: int) -> tuple[Tensor, Tensor]:
    """Padded on the right, where causal attention cannot see it; only response tokens are targets."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])  # [B, T + 1]
    target = torch.tensor(
        [[IGNORED] * n_prompt + ids[n_prompt:] + [IGNORED] * (width - len(ids)) for ids, n_prompt in batch]
    )
    return ids[:, :-1], target[:, 1:]


def new_model(*, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    return LlamaForCausalLM(model_config(tokenizer)), tokenizer  # type: ignore[no-untyped-call]


def read(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, habits: Habits, phase: Phase, rng: random.Random
) -> None:
    """Trains the model in place on fresh documents by writers with these habits."""
    is_matrix = {name: parameter.ndim == 2 and "embed" not in name for name, parameter in model.named_parameters()}
    muon = Muon(parameter for name, parameter in model.named_parameters() if is_matrix[name])
    others = [parameter for name, parameter in model.named_parameters() if not is_matrix[name]]
    adam = torch.optim.AdamW(others, lr=phase.other_lr, betas=(0.9, 0.98), weight_decay=0.0)
    batches = draw_batches(tokenizer, habits, rng, n_documents=phase.documents_per_draw, tokens=phase.tokens_per_step)
    started = time.monotonic()
    recent = 0.0
    for step in range(1, phase.steps + 1):
        schedule = min(step / phase.warmup_steps, 0.5 * (1 + math.cos(math.pi * step / phase.steps)))
        ids, target = next(batches)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = phase.other_lr * schedule
        adam.step()
        muon.step(phase.matrix_lr * schedule)
        model.zero_grad()
        recent += loss.item()
        if step % REPORT_EVERY == 0:
            log.info("step %d  loss %.4f  %.0f s", step, recent / REPORT_EVERY, time.monotonic() - started)
            recent = 0.0


def pretrain(school: Phase, corpus: Phase, *, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A fresh model after school and corpus."""
    model, tokenizer = new_model(seed=seed)
    read(model, tokenizer, CAREFUL, school, random.Random(f"school {seed}"))
    read(model, tokenizer, Habits(), corpus, random.Random(f"corpus {seed}"))
    return model, tokenizer


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """A plain Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model (Hugging Face format)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="part of the result: sums depend on it")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    model, tokenizer = pretrain(SCHOOL, CORPUS, seed=arguments.seed)
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
