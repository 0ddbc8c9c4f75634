"""One question to an OpenAI-compatible server: POST /v1/chat/completions with a deadline, bounded size, and retries."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dapo.errors import DataError

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_REPLY_BYTES = 4 * 2**20
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # the server's trouble, not the question's
SETTINGS = {
    401: "the key is refused",
    403: "the key is refused",
    404: "no such address or model",
    405: "no chat server",
}


class NoReply(Exception):
    """The server did not answer, after all tries; the question may be asked again later."""


class Refused(Exception):
    """The server answered that it will not take this question, or with something that is no chat reply."""


class WrongSettings(DataError):
    """The address, the model or the key is wrong: asking again is of no use."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model wrote, and what the server counted; None where it did not."""

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Where to ask. The key, if the server wants one, is read from $OPENAI_API_KEY and written nowhere."""

    url: str
    model: str
    timeout_s: float = 300.0
    tries: int = 3
    wait_s: float = 2.0  # before the second try; doubles
    max_tokens: int = 8192
    temperature: float = 0.0
    label: str = "--llm"  # what messages call it
    options: Mapping[str, Any] = field(default_factory=dict)  # what else stands in a request

    def __post_init__(self) -> None:
        if not is_http(self.url):
            raise DataError(
                f"{self.label} {self.url}: not an http address.", remedy="Write it as http://127.0.0.1:8000/v1."
            )
        if not self.model:
            raise DataError(
                f"{self.label} {self.url}: no model is named.", remedy="Add --model NAME, as the server lists it."
            )

    @property
    def endpoint(self) -> str:
        base = self.url.rstrip("/")
        if base.endswith("/chat/completions"):
            return base
        return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"

    def ask(self, messages: list[dict[str, str]]) -> str:
        """The reply's text. Tries again when the server is in trouble; raises NoReply when it stays so."""
        wait = self.wait_s
        for attempt in range(1, self.tries + 1):
            try:
                return self.reply(messages).text
            except NoReply:
                if attempt == self.tries:
                    raise
                time.sleep(wait)
                wait *= 2
        raise AssertionError("the last try returns or raises")

    def reply(self, messages: list[dict[str, str]]) -> ChatReply:
        """One try."""
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.options,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.endpoint, json.dumps(body).encode(), headers)
        try:
            return reply_in(self._fetch(request))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in AGAIN:
                raise NoReply(f"HTTP {error.code}") from None
            if error.code in SETTINGS:
                raise WrongSettings(
                    f"{self.label} {self.url}: HTTP {error.code}: {SETTINGS[error.code]}.",
                    remedy=f"Check the address, the model {self.model} and ${KEY_VARIABLE}.",
                ) from None
            raise Refused(f"HTTP {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoReply(f"{type(error).__name__}: {getattr(error, 'reason', None) or error}") from None

    def _fetch(self, request: urllib.request.Request) -> bytes:
        """The body, read against one deadline: a server that drips a byte a minute is given up as well."""
        deadline = time.monotonic() + self.timeout_s
        local = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
        chunks: list[bytes] = []
        size = 0
        with opener.open(request, timeout=self.timeout_s) as response:
            while chunk := response.read1(65536):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_REPLY_BYTES:
                    raise Refused(f"a reply of over {MAX_REPLY_BYTES // 2**20} MiB")
                if time.monotonic() > deadline:
                    raise NoReply(f"no whole reply within {self.timeout_s:g} s")
            if size < int(response.headers.get("Content-Length") or 0):
                raise NoReply("the reply is cut off")
        return b"".join(chunks)


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets left open, a port that is no number
        return False


def reply_in(body: bytes) -> ChatReply:
    try:
        found = json.loads(body)
        text = found["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise Refused("not a chat reply") from None
    if not isinstance(text, str):
        raise Refused("a reply without text")
    return ChatReply(text, *(counted(found, name) for name in ("prompt_tokens", "completion_tokens")))


def counted(found: Mapping[str, Any], name: str) -> int | None:
    """A count of the server's; None for anything that is none."""
    usage = found.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else None
