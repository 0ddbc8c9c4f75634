"""The card of an exported model: it names base and licence, and no two of its sentences contradict each other."""

import re
from pathlib import Path

import pytest

from dapo.config import load_recipe
from dapo.config.load import preset_names
from dapo.release.base_model import base_model_of, front_matter_of
from dapo.release.card import changes, model_card

STATE = {"updates": 8, "data": "abc", "sampling": {"order": {"n_problems": 40}}}


def line(step: int, *, k: int = 4, name: str = "exam") -> dict[str, object]:
    scores = {f"{score}@k": step / 10 for score in ("avg", "pass", "maj")}
    intervals = {f"{score}@k_interval": [0.0, 1.0] for score in ("avg", "pass", "maj")}
    return {"step": step, "set": name, "k": k, "problems": 9, **scores, **intervals}


def card(*overrides: str, step: int = 4, lines: list[dict[str, object]] | None = None) -> str:
    config = load_recipe("quickstart", ["train.steps=4", *overrides]).config
    return model_card("mine", config, step, STATE, lines or [])


def write_card(folder: Path, front: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    return folder


def test_an_evaluation_that_did_not_happen_is_not_claimed():
    text = card()  # the recipe names an evaluation set
    assert "The run was not evaluated." in text
    assert "Evaluated on" not in text
    assert "Evaluated on `exam`" in card(lines=[line(4)])


@pytest.mark.parametrize(
    ("steps", "before", "after", "of_step", "is_older"),
    [
        ([0, 4], "0.000 [0.000, 1.000]", "0.400 [0.000, 1.000]", "4", False),
        ([0, 3], "0.000 [0.000, 1.000]", "0.300 [0.000, 1.000]", "3", True),
        ([0], "0.000 [0.000, 1.000]", "not measured", "none", True),
        ([2, 4], "not measured", "0.400 [0.000, 1.000]", "4", False),
        ([0, 4, 6], "0.000 [0.000, 1.000]", "0.400 [0.000, 1.000]", "4", False),  # a later model's
    ],
)
def test_scores_say_which_steps_model_they_are_of(steps, before, after, of_step, is_older):
    text = card(lines=[line(step) for step in steps])
    assert f"| exam | 9 | avg@4 | {before} | {after} | {of_step} |" in text
    assert ("This model is that of step 4" in text) is is_older


def test_a_k_that_changed_is_told():
    assert "| avg@8 | 0.000 [0.000, 1.000] (k = 4) | 0.400" in card(lines=[line(0, k=4), line(4, k=8)])


@pytest.mark.parametrize("preset", preset_names())
def test_what_is_as_in_the_preset_is_not_called_changed(preset):
    said = changes(load_recipe("quickstart", [f"preset={preset}"]).config)  # the recipe's own warm-up differs
    pairs = re.findall(r"= ([^,]+?) \(preset: ([^,]+?)\)", said)
    assert len(pairs) == said.count("(preset:")
    assert all(now != before for now, before in pairs)


def test_a_preset_that_was_changed_is_not_passed_off_as_it():
    assert "Changed from the preset" not in card("preset=dapo", "train.warmup_steps=20")
    text = card("preset=dapo", "sampling.dynamic=false", "algorithm.clip.high=0.2")
    assert "`algorithm.clip.high` = 0.2 (preset: 0.28)" in text
    assert "`sampling.dynamic` = false (preset: true)" in text


def test_a_control_is_named_and_nothing_else_is_blamed():
    text = card("rewards.control=negated")
    assert "**Not the paper's algorithm**: a control experiment, `rewards.control` = negated" in text
    assert "older weights" not in text


def test_a_checkpoint_on_the_way_and_an_adapter_are_told():
    assert "3 steps of the 4 planned, 8 updates" in card(step=3)
    assert "4 steps, 8 updates" in card()
    assert "adapter of rank 8 was trained and is merged" in card("model.lora.rank=8")
    four_bits = card("model.lora.rank=8", "model.lora.quantization=nf4")
    assert "over weights in 4 bits (NF4, a fitted scale per block of 32), and is merged" in four_bits
    eight_bits = card("model.lora.rank=8", "model.lora.quantization=int8")
    assert "over weights in 8 bits (int8, a scale per block of 64), and is merged" in eight_bits


# ------------------------------------------------------------------ base model and licence


def test_the_bundled_model():
    text = card()
    assert "license: apache-2.0\n" in text
    assert "Base model: the toy model that ships with dapo." in text


def test_a_folder_is_asked_for_its_card(tmp_path: Path):
    folder = write_card(tmp_path / "base", "license: mit\nbase_model: [org/first, org/second]")
    text = card(f"model.path={folder}")
    assert "license: mit\n" in text
    assert "base_model: org/first\n" in text
    assert "the local folder `base`, made from `org/first`" in text
    assert "Licence of the base model: mit (as its own card says)" in text


def test_terms_of_their_own_keep_their_name(tmp_path: Path):
    folder = write_card(tmp_path / "base", "license: other\nlicense_name: model-research")
    assert "license: other\nlicense_name: model-research\n" in card(f"model.path={folder}")


@pytest.mark.parametrize("front", ["license: unknown", "license: 'x\\ny: 1'", "a: [", "license: {a: b}", "- 1"])
def test_what_is_not_known_is_said_plainly(tmp_path: Path, front: str):
    text = card(f"model.path={write_card(tmp_path / 'base', front)}")
    assert "license: unknown\n" in text
    assert "Licence of the base model: unknown" in text
    assert "what it was made from is unknown" in text


def test_the_cache_of_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("c0ffee")
    write_card(home / "snapshots" / "c0ffee", "license: apache-2.0")
    base = base_model_of("org/name", None)
    assert (base.licence, base.hub_name) == ("apache-2.0", "org/name")
    assert base_model_of("org/other", None).licence == ""
    assert front_matter_of(None) == {}


def test_a_card_without_a_licence_is_not_called_missing(tmp_path):
    folder = write_card(tmp_path / "base", "tags: [mine]")
    assert "its card names none" in base_model_of(str(folder), None).licence_in_words
    assert "no card of it was found" in base_model_of(str(tmp_path / "other"), None).licence_in_words
