"""Problem sets that bring their verifier: a task of reasoning-gym is scored by its own rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GYM_PREFIX = "gym:"


def own_verifier(path: str) -> str | None:
    """The verifier that comes with a problem set, None for most."""
    return "gym" if path.startswith(GYM_PREFIX) else None


def with_own_verifier(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys with the verifier that data.train brings, where none is named: one that is named is the user's wish."""
    train = keys.get("data.train")
    brought = own_verifier(train) if isinstance(train, str) else None
    return {"rewards.verifier": brought, **keys} if brought else dict(keys)
