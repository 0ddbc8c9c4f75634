"""Prompts: the templates' text, the chat template around it, and nothing ever cut."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from dapo.config import load_recipe
from dapo.config.sources import eval_sources
from dapo.data import PromptFormat, Why, encode_problems, load_problems
from dapo.data.encoded import load_encoded, load_train
from dapo.data.prepare.clean import write_problems
from dapo.data.prompts import EXAMPLES, TEMPLATES
from dapo.data.wrappers import DAPO_PREFIX, DAPO_SUFFIX
from dapo.errors import ConfigError, DataError
from dapo.types import Problem

PROBLEM = Problem("id", "What is $2 + 3$?", "5")
CHAT = (
    "{% for m in messages %}{{ m.role }} > {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant >{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A word-level tokenizer with a begin-of-text token, so that a doubled one would show."""
    from transformers import PreTrainedTokenizerFast

    texts = [PromptFormat(t, chat=False).text(PROBLEM) + CHAT for t in TEMPLATES]
    words = sorted(
        {word for text in texts for word, _ in Whitespace().pre_tokenize_str(text)} | {"user", "system", "Brief", ">"}
    )
    raw = Tokenizer(WordLevel({"<bos>": 0, "<unk>": 1, **{w: i + 2 for i, w in enumerate(words)}}, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    raw.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", unk_token="<unk>", chat_template=CHAT)


def test_templates_hold_the_question_as_it_is():
    texts = {name: PromptFormat(name).text(PROBLEM) for name in TEMPLATES}
    assert all(PROBLEM.question in text for text in texts.values())
    assert texts["raw"] == PROBLEM.question
    assert texts["dapo"] == DAPO_PREFIX + PROBLEM.question + DAPO_SUFFIX
    assert "\\boxed{}" in texts["boxed"]
    assert texts["few-shot"].index(EXAMPLES[0].question) < texts["few-shot"].index(PROBLEM.question)
    assert len(set(texts.values())) == len(texts)


def test_the_chat_template_is_applied_once(tokenizer):
    tokens = PromptFormat("dapo").encode(PROBLEM, tokenizer)
    text = tokenizer.decode(tokens)
    assert text.startswith("user >")
    assert text.endswith("assistant >")
    assert tokenizer.bos_token_id not in tokens  # this chat template writes none


def test_without_chat_the_tokenizers_own_special_tokens_stand(tokenizer):
    tokens = PromptFormat("raw", chat=False).encode(PROBLEM, tokenizer)
    assert tokens == tuple(tokenizer.encode(PROBLEM.question))
    assert tokens.count(tokenizer.bos_token_id) == 1


def test_a_system_text_comes_first(tokenizer):
    text = tokenizer.decode(PromptFormat("raw", system="Brief").encode(PROBLEM, tokenizer))
    assert text.startswith("system > Brief user >")


def test_prompts_over_the_limit_are_dropped_and_counted_never_cut(tokenizer):
    long = Problem("long", " ".join(["2"] * 500), "5")
    prompt = PromptFormat("dapo")
    limit = len(prompt.encode(PROBLEM, tokenizer))
    kept, drops = encode_problems([PROBLEM, long], prompt, tokenizer, max_prompt_tokens=limit)
    assert [one.problem.id for one in kept] == ["id"]
    assert kept[0].tokens == prompt.encode(PROBLEM, tokenizer)
    assert [(drop.why, drop.row) for drop in drops] == [(Why.TOO_LONG, 2)]
    with pytest.raises(DataError, match=f"Raise it to at least {limit}"):
        encode_problems([PROBLEM, long], prompt, tokenizer, max_prompt_tokens=limit - 1)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"data.template = 'dappo'.*\n.*dapo, boxed"):
        PromptFormat("dappo")
    with pytest.raises(ConfigError, match="no effect"):
        PromptFormat(chat=False, system="Brief")
    bare = type("Bare", (), {"chat_template": None})()
    with pytest.raises(DataError, match="tokenizer has none"):
        PromptFormat().encode(PROBLEM, bare)


# ------------------------------------------------------------------ chats

SYSTEM = (("system", "Brief"), ("user", "What is $2 + 3$?"))


def test_a_row_that_is_a_chat_goes_to_the_model_as_it_is(tokenizer):
    prompt = PromptFormat("dapo", system="What")
    text = tokenizer.decode(prompt.encode(Problem("id", "", "5", turns=SYSTEM), tokenizer))
    assert text.startswith("system > Brief")  # its own system message wins
    assert DAPO_PREFIX.split()[0] not in text
    turns = (("user", "What is"), ("assistant", "Brief"), SYSTEM[1])
    assert [turn["role"] for turn in prompt.chat_of(Problem("id", "", "5", turns=turns))] == [
        "system", "user", "assistant", "user"
    ]  # fmt: skip
    with pytest.raises(DataError, match="chat_template = false: the rows are chats"):
        PromptFormat("raw", chat=False).encode(Problem("id", "", "5", turns=SYSTEM), tokenizer)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x", "no system role"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "leaves the system"),
    ],
)
def test_a_template_without_a_system_role_is_refused_not_ignored(tokenizer, template: str, says: str):
    from copy import copy

    other = copy(tokenizer)
    other.chat_template = template
    with pytest.raises(DataError, match=says) as error:
        PromptFormat("raw", system="Brief").encode(PROBLEM, other)
    assert "system_prompt" in error.value.remedy
    assert PromptFormat("raw").encode(PROBLEM, other)


def test_each_source_of_a_run_has_a_template_and_a_system_prompt_of_its_own(tokenizer, tmp_path):
    """In training and in evaluation. And a verifier gets the data source that a row names, not the mixture's."""
    path = write_rows(tmp_path / "rows.jsonl", {"question": "What is $2 + 3$?", "answer": "5", "data_source": "Gauss"})
    table = f"{{a={{path='{path}', template='raw', system_prompt='Brief'}}, b={{path='{path}', template='raw'}}}}"
    keys = ["data.chat_template=true", f"data.train={table}", f"data.eval={table}", "limits.max_prompt_tokens=512"]
    config = load_recipe("quickstart", keys).config
    encoded = load_train(config, tokenizer)
    evaluated = [load_encoded(source, config, tokenizer, use="eval") for source in eval_sources(config)]
    for sources in (encoded.sources, evaluated):
        with_system, without = (tokenizer.decode(source.prompts[0]) for source in sources)
        assert with_system.startswith("system > Brief")
        assert without.startswith("user > What is")
        assert [source.format.system for source in sources] == ["Brief", ""]
    for problem in encoded.problems:
        assert (problem.source, problem.for_verifier()["data_source"]) == (problem.id[0], "Gauss")


def write_rows(path, *rows: dict[str, object]) -> str:
    import json

    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turn(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_messages_are_read_and_two_chats_with_the_same_last_message_stay_two(tmp_path):
    path = write_rows(
        tmp_path / "chats.jsonl",
        {"messages": [turn("system", "Add."), turn("user", "2 and 3")], "answer": "5", "level": 1},
        {"messages": [turn("system", "Multiply."), turn("user", "2 and 3")], "answer": "6", "level": 2},
        {"messages": [turn("user", "7?")], "answer": 7},
    )
    problems = load_problems(path)
    assert [(p.turns, p.answer) for p in problems] == [
        ((("system", "Add."), ("user", "2 and 3")), "5"),
        ((("system", "Multiply."), ("user", "2 and 3")), "6"),
        ((("user", "7?"),), "7"),
    ]
    assert len({p.id for p in problems}) == 3
    assert problems[0].meta == {"level": 1}
    for suffix in (".jsonl", ".parquet"):  # what `dapo data prepare` writes, comes back
        write_problems(tmp_path / f"again{suffix}", list(problems), suffix)
        again = load_problems(str(tmp_path / f"again{suffix}"))
        assert [(p.turns, p.answer, p.meta) for p in again] == [(p.turns, p.answer, p.meta) for p in problems]


def test_a_question_beside_messages_is_read_as_before(tmp_path):
    row = {"problem": "2+3?", "answer": "5", "messages": [turn("user", "x"), turn("assistant", "5")]}
    assert load_problems(write_rows(tmp_path / "both.jsonl", row))[0].turns == ()


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "there are no messages"),
        ([turn("user", "2?"), turn("assistant", "2")], "the last message is of 'assistant', not of 'user'"),
        ([turn("user", "2?"), turn("system", "Brief"), turn("user", "3?")], "a system message comes first"),
        ([turn("tool", "2"), turn("user", "3?")], "roles tool, user"),
        ([turn("user", "  ")], "a message has no text"),
        ([turn("user", None)], "a message has no text"),
        ([{"content": "2?"}], "no column 'role'"),
        (["2?"], "string indices|not subscriptable"),
    ],
)
def test_a_chat_that_is_none_is_refused_by_its_row(tmp_path, messages, says: str):
    good = {"messages": [turn("user", "2?")], "answer": "2"}
    path = write_rows(tmp_path / "chats.jsonl", good, {"messages": messages, "answer": "2"})
    with pytest.raises(DataError, match=f"row 2: .*({says})"):
        load_problems(path)
