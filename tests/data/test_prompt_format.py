"""Prompts: the templates' text, the chat template around it, and nothing ever cut."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from dapo.data import PromptFormat, Why, encode_problems
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
