"""A foreign config: no escape of it reaches the terminal, no markup the model card, no absurd number a run."""

import json

import pytest

from command_line import dapo
from dapo.config.load import load_recipe, to_toml
from dapo.errors import ConfigError
from dapo.release.card import literal, model_card, yaml

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
STATE = {"updates": 1, "sampling": {"order": {"n_problems": 1}}, "data": "0"}


@pytest.mark.parametrize(
    "words",
    [
        ["train", "RECIPE"],
        ["explain", "RECIPE"],
        ["resume", "FOLDER"],
        ["eval", "--model", "FOLDER", "--data", f"{ESCAPE}.jsonl"],
        ["report", f"FOLDER{ESCAPE}"],
        ["data", "check", f"{ESCAPE}.jsonl"],
        ["verify", f"{ESCAPE}.jsonl"],
    ],
)
def test_no_escape_reaches_the_terminal(words, tmp_path):
    plain = to_toml(load_recipe("quickstart", []).config)
    escaped = "".join(f"\\u{ord(character):04x}" for character in ESCAPE)
    (tmp_path / "config.toml").write_text(plain.replace('path = "bundled"', f'path = "./{escaped}"'))
    places = {"RECIPE": tmp_path / "config.toml", "FOLDER": tmp_path}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    answer = dapo(*words)
    assert answer.returncode == 2
    assert not set(ESCAPE) & {*"\x1b\x07\u202e"} & set(answer.stdout + answer.stderr)


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[1m", "a\u202eb", "a\x85b"])
def test_a_config_value_holds_no_line_break_and_no_escape(value):
    with pytest.raises(ConfigError, match=r"model\.path: contains a line break"):
        load_recipe("quickstart", [f"model.path={json.dumps(value)}"])


MARKUP = "./x`<script>alert(1)</script>|[a](javascript:b)"


def test_the_model_card_holds_no_markup_of_the_config():
    config = load_recipe("quickstart", [f"model.path={MARKUP!r}"]).config
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"train": MARKUP, "template": "<b>x</b>"})}
    )
    line = {"set": MARKUP, "step": 0, "k": 1, "problems": 1, "avg@k": 0.5, "avg@k_interval": [0, 1], "pass@k": None}
    card = model_card("name", config, 0, STATE, [line | {"maj@k": None}])
    for place in range(len(card)):
        if card.startswith("<script>", place) or card.startswith("[a](", place) or card.startswith("<b>", place):
            before = card[:place].rpartition("\n")[2]
            assert before.count("`") % 2 == 1, before  # within code
    assert f"| {literal('<b>x</b>')} |" in card


def test_front_matter_takes_one_line_of_a_foreign_name():
    assert yaml("owner/name-1.5B") == "owner/name-1.5B"
    assert yaml("x: y") == '"x: y"'
    assert yaml("x\ny: z") == '"x\\ny: z"'


@pytest.mark.parametrize(
    "override",
    [
        "rewards.workers=1e20", f"rewards.workers={10**20}", "rewards.cpu_seconds=1e10", f"rewards.memory_mb={10**15}",
        "train.lr=1e308", f"train.steps={10**18}", "sampling.temperature=1e300", f"sampling.prompts_per_step={10**12}",
        f"eval.k={10**12}", f"cluster.gpus={10**9}", f"cluster.timeout_s={10**12}",
        f"limits.max_response_tokens={10**15}", f"rollout.max_concurrent_sequences={10**15}",
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
        load_recipe("quickstart", [override])


@pytest.mark.parametrize(
    "words", [["--seconds", "1e10"], ["--workers", str(10**20)], ["--memory-mb", str(10**15)], ["--seconds", "nan"]]
)
def test_absurd_limits_of_verify_are_refused(words):
    answer = dapo("verify", "-", *words, stdin='{"response": "Answer: 1", "answer": "1"}\n')
    assert answer.returncode == 2
    assert words[1][:3] in answer.stderr.replace(",", "") or "1e+10" in answer.stderr
