"""The Hugging Face hub: asked once whether it answers, before the libraries retry for a minute."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

TIMEOUT_S = 5.0


def is_hub_name(path: str) -> bool:
    """Can `path` be a model on the hub? Not what exists here or is written as a path of this machine."""
    return not os.path.exists(path) and not path.startswith(("/", ".", "~")) and path.count("/") <= 1


def is_cached(name: str, revision: str | None) -> bool:
    """Is this model in the cache? Perhaps not with all of its files."""
    return cached_file(name, "config.json", revision=revision) is not None


def cached_file(name: str, file: str, *, revision: str | None) -> Path | None:
    """A file of a hub model where the cache has it; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except ValueError:  # not a valid hub name
        return None
    return Path(found) if isinstance(found, str) else None


def model_file(path: str, file: str, *, revision: str | None = None) -> Path | None:
    """A file of a model: of its folder, or of the cache where `path` is a name of the hub; nothing is fetched."""
    if is_hub_name(path):
        return cached_file(path, file, revision=revision)
    found = Path(path) / file
    return found if os.path.isfile(found) else None


@cache
def why_offline() -> str:
    """Why the hub is not used; empty where it answers.

    Where it does not, this process goes on as with HF_HUB_OFFLINE=1, from the cache: each of the libraries' many
    requests would be tried five times.
    """
    import httpx
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:  # also of a proxy's settings
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes started from here
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return ""
