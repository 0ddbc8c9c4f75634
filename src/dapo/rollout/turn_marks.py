"""How the text of a later turn becomes tokens: by the chat template's own turn marks, or as it is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jinja2

from dapo.data.prompts import rendered_chat
from dapo.environments.builtin import KEY
from dapo.errors import ConfigError, DataError

ASKED, ANSWERED, TOLD = "One question.", "One answer.", "One more line."
REMEDY = "Use a model whose chat template only appends, or set data.chat_template = false."


class TurnMarks:
    """Encodes what an environment says after a model's turn, up to where the model's next turn begins.

    With a chat template: what the template writes between the end of the model's text and its next turn. Where the
    model has sampled the end of its turn itself, and was not stopped by a string, the first mark is left out. The chat
    before is never rendered again.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, eos_ids: Collection[int], key: str = KEY) -> None:
        """`key` is what messages say asked for turns."""
        self.tokenizer, self.chat, self.eos_ids, self.key = tokenizer, chat, eos_ids, key
        if chat:
            self._refuse_what_cannot_be_continued()

    def encode(self, text: str, role: str, *, after: int) -> tuple[int, ...]:
        """The tokens from the model's last token, `after`, to its next turn. DataError for a role that the template
        does not know.
        """
        if not self.chat:
            return self._encoded(text)
        marked = self._encoded(self._between([{"role": "user", "content": ASKED}], text, role))
        return marked[1:] if after in self.eos_ids else marked

    def decode(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _between(self, chat: list[dict[str, str]], text: str, role: str) -> str:
        """What the template writes from the end of the model's answer to `chat` on, the mark of its end included."""
        before = rendered_chat(chat, self.tokenizer) + ANSWERED
        after = [*chat, {"role": "assistant", "content": ANSWERED}, {"role": role, "content": text}]
        rendered = rendered_chat(after, self.tokenizer)
        if not rendered.startswith(before):
            raise DataError(f"it re-renders earlier turns when a message of {role!r} is appended", remedy=REMEDY)
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
            raise self._cannot_continue(why.rstrip(".")) from None
        if first != second:
            raise self._cannot_continue("its turn marks depend on how many turns there are")
        if TOLD not in first:
            raise self._cannot_continue("it leaves out a user's later messages")
        end = self._encoded(first)[:1]
        if not {*end} & {*self.eos_ids}:
            mark = self.tokenizer.decode(list(end))
            raise ConfigError(
                f"{self.key}: the chat template ends a turn by {mark!r}, which is no end token of the model.",
                remedy="Add its id to eos_token_id in the model's generation_config.json, or use another model.",
            )

    def _cannot_continue(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.key}: the model's chat template cannot be continued turn by turn: {why}.", remedy=REMEDY
        )
