"""The prompts of all requests: each is prefilled once, and evicted while none of its responses runs."""

from __future__ import annotations

from dapo.rollout.engine import Request
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.pages import PagePool, Prompt


class Prompts:
    """Prompts without their last tokens, in the order in which they were first asked for."""

    def __init__(self, pool: PagePool, cache: PagedCache) -> None:
        self._pool, self._cache = pool, cache
        self._by_tokens: dict[tuple[int, ...], Prompt] = {}

    def of(self, request: Request) -> Prompt:
        """The prompt of a request that has joined."""
        return self._by_tokens[shared_part(request)]

    def join(self, request: Request) -> None:
        """Count one more request with this prompt."""
        tokens = shared_part(request)
        self._by_tokens.setdefault(tokens, Prompt(tokens, self._cache.page_tokens)).n_users += 1

    def leave(self, prompt: Prompt) -> None:
        """Count one request less; the last one frees the pages."""
        prompt.n_users -= 1
        if prompt.n_users == 0:
            self._forget(prompt)
            del self._by_tokens[prompt.tokens]

    def void(self) -> None:
        """The weights have changed: all keys and values are out of date."""
        for prompt in self._by_tokens.values():
            prompt.is_filled = False

    def evict_idle(self, but: Prompt | None = None) -> bool:
        """Free the pages of a prompt without running responses; it is prefilled again when one is admitted."""
        for prompt in self._by_tokens.values():
            if len(prompt.pages) and not prompt.n_running and prompt is not but:
                self._forget(prompt)
                return True
        return False

    def _forget(self, prompt: Prompt) -> None:
        if prompt.is_suspect:
            self._cache.clear(prompt.pages)
        self._pool.give(prompt.pages)
        prompt.pages, prompt.is_filled = prompt.pages[:0], False


def shared_part(request: Request) -> tuple[int, ...]:
    """What all responses of a group begin with; of a later turn, the prompt of its episode."""
    return request.prompt[: len(request.prompt) - request.key.start - 1]
