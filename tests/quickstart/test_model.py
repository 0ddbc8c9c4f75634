"""The embedded base model: small, loadable, reproducible, and as unreliable as its card says."""

import hashlib
import json
import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import dapo.quickstart
from dapo.quickstart import pretrain as pretraining
from dapo.quickstart.card import measure
from dapo.quickstart.corpus import Habits, draw_document
from dapo.quickstart.pretrain import Phase, pretrain, save
from dapo.quickstart.task import eval_problems, train_problems

FOLDER = Path(dapo.quickstart.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_the_folder_is_at_most_4_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000


def test_tokenizer_round_trip(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        question, response, _ = draw_document(Habits(), rng)
        ids = tokenizer.encode(question + response)
        assert tokenizer.decode(ids) == question + response
        assert ids == tokenizer.encode(question) + tokenizer.encode(response), "the border makes no new token"
    printable = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(printable)) == printable
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_special_tokens_agree(model, tokenizer):
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(special)) == 3
    assert special == [model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.encode("1<eos>")[-1] == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_pretraining_is_reproducible_to_the_byte(tmp_path: Path, seed: int):
    phase = Phase(steps=10, matrix_lr=1e-2, other_lr=1e-3, tokens_per_step=512, documents_per_draw=256)
    for run in ("first", "second"):
        save(*pretrain(phase, phase, seed=seed), tmp_path / run)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    for name in files:
        first, second = ((tmp_path / run / name).read_bytes() for run in ("first", "second"))
        assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest(), name


@pytest.mark.slow
def test_the_base_model_is_confidently_unreliable():
    """Under the sampling of evaluation: about 0.30 right, and not for want of format."""
    scores = measure(FOLDER, eval_problems(), k=2, top_p=0.7)
    assert 0.25 <= scores["all"].accuracy <= 0.35
    assert scores["all"].truncated + scores["all"].unparseable <= 0.10
    assert scores["1"].accuracy >= 0.8
    assert scores["1"].accuracy > scores["3"].accuracy > scores["5"].accuracy


@pytest.mark.slow
def test_everything_dapo_addresses_occurs_in_training():
    """Under the sampling of training: problems with mixed verdicts, with none right, and truncated responses."""
    scores = measure(FOLDER, train_problems()[:100], k=8, top_p=1.0)
    assert 0.03 <= scores["all"].truncated <= 0.15
    assert scores["all"].unparseable <= 0.02
    assert scores["all"].solved - scores["all"].always >= 0.3, "mixed groups"
    assert scores["5"].solved <= 0.6, "mostly without a right response"
    assert scores["1"].solved == 1.0


def test_the_card_states_what_is_in_the_folder():
    recorded = json.loads((FOLDER / "scores.json").read_text())
    assert recorded["k"] == 64
    for scores in (recorded["top_p 0.7"], recorded["top_p 1.0"]):
        assert set(scores) == {"1", "2", "3", "4", "5", "all"}
        card = (FOLDER / "README.md").read_text()
        assert all(f"| {row['accuracy']:.3f} | {row['solved']:.3f} |" in card for row in scores.values())


@pytest.mark.parametrize("n_documents", [1, 2, 4, 5, 6, 11])
@pytest.mark.parametrize("tokens", [3, 24, 25, 26, 1000])
def test_border_a_batch_holds_what_fits_and_no_document_is_left_out(
    n_documents: int, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    """Documents of 5 tokens, the first two of a question; a budget below one of them gives it a batch of its own."""
    drawn = [([1, 2, 10 * i, 10 * i + 1, 10 * i + 2], 2) for i in range(1, n_documents + 1)]
    monkeypatch.setattr(pretraining, "draw_document", lambda _habits, _rng: None)
    monkeypatch.setattr(pretraining, "_encode", lambda _tokenizer, _documents: list(drawn))
    tokenizer = SimpleNamespace(pad_token_id=0)
    batches = pretraining.draw_batches(tokenizer, None, random.Random(0), n_documents=n_documents, tokens=tokens)
    per_batch = max(1, tokens // 5)
    once = [target for _, target in islice(batches, -(-n_documents // per_batch))]
    assert all(len(target) <= per_batch for target in once)
    seen = [row[row >= 0].tolist() for target in once for row in target]
    assert sorted(seen) == [ids[2:] for ids, _ in drawn]
