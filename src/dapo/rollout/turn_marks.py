"""How the text of a later turn becomes tokens: by the chat template's own turn marks, or as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jinja2

from dapo.data.prompts import rendered_chat
from dapo.errors import ConfigError, DataError
from dapo.models.policy import Policy

ASKED, ANSWERED, TOLD = "One question.", "One answer.", "One more line."
REMEDY = "Use a model whose chat template only ever adds to a chat, or set data.chat_template = false."


class TurnMarks:
    """Encodes what an environment says after a model's turn, up to where the model's next turn begins.

    With a chat template: what the template writes between the end of the model's text and its next turn. The model has
    drawn the end of its turn itself, so the first mark is left out. The chat before is never rendered again.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, eos_ids: Collection[int]) -> None:
        self.tokenizer, self.chat, self.eos_ids = tokenizer, chat, eos_ids
        if chat:
            self._refuse_what_cannot_be_continued()

    def encode(self, text: str, role: str) -> tuple[int, ...]:
        """The tokens between two turns of the model; DataError where the template does not know the role."""
        if not self.chat:
            return self._encoded(text)
        return self._encoded(self._between([{"role": "user", "content": ASKED}], text, role))[1:]

    def decode(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _between(self, chat: list[dict[str, str]], text: str, role: str) -> str:
        """What the template writes from the end of the model's answer to `chat` on, the mark of its end included."""
        before = rendered_chat(chat, self.tokenizer) + ANSWERED
        after = [*chat, {"role": "assistant", "content": ANSWERED}, {"role": role, "content": text}]
        rendered = rendered_chat(after, self.tokenizer)
        if not rendered.startswith(before):
            raise DataError(f"it writes an earlier turn otherwise once {role!r} has spoken", remedy=REMEDY)
        return rendered[len(before) :]

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _refuse_what_cannot_be_continued(self) -> None:
        """ConfigError where a later turn changes what stands before it, or does not begin with an end of turn."""
        asked = [{"role": "user", "content": ASKED}]
        later = [*asked, {"role": "assistant", "content": ANSWERED}, {"role": "user", "content": ASKED}]
        try:
            first, second = (self._between(chat, TOLD, "user") for chat in (asked, later))
        except (DataError, jinja2.TemplateError) as error:
            why = error.message if isinstance(error, DataError) else str(error)
            raise _cannot_continue(why.rstrip(".")) from None
        if first != second:
            raise _cannot_continue("its turn marks depend on how many turns there are")
        if TOLD not in first:
            raise _cannot_continue("it leaves out what a user says later")
        end = self._encoded(first)[:1]
        if not {*end} & {*self.eos_ids}:
            mark = self.tokenizer.decode(list(end))
            raise ConfigError(
                f"data.environment: the chat template ends a turn by {mark!r}, which is no end token of the model.",
                remedy="Add its id to eos_token_id in the model's generation_config.json, or use another model.",
            )


def end_turns_at(policy: Policy, marks: Iterable[str], what: str) -> None:
    """Strings that end a turn become end tokens of the policy. A string of several tokens cannot be one."""
    tokens = {token_of(mark, policy.tokenizer, what) for mark in marks}
    policy.eos_ids = tuple(sorted({*policy.eos_ids, *tokens}))


def token_of(mark: str, tokenizer: Any, what: str) -> int:
    tokens = tokenizer.encode(mark, add_special_tokens=False)
    if len(tokens) != 1:
        raise ConfigError(
            f"{what}: it ends a turn at {mark!r}, which is {len(tokens)} tokens for this model.",
            remedy="A turn can end at a single token: choose another mark, or let the end token do it.",
        )
    return int(tokens[0])


def _cannot_continue(why: str) -> ConfigError:
    return ConfigError(
        f"data.environment: the model's chat template cannot be continued turn by turn: {why}.", remedy=REMEDY
    )
