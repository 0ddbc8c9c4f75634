"""An exported folder as a model of the Hugging Face hub. The only place that sends anything anywhere."""

from __future__ import annotations

import shlex
from pathlib import Path

from dapo.errors import ConfigError, EngineError


def refuse_name(repo: str) -> None:
    """ConfigError for what cannot be a repository's name, before anything is exported."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push {repo}: {in_words(error)}", remedy="Write it as USER/NAME.") from None


def push(folder: Path, repo: str, *, is_public: bool = False) -> str:
    """Upload the folder in one commit; the repository is made if there is none, private unless told. Its address."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(library_name="dapo")
    try:
        made = api.create_repo(repo, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Model exported by dapo")
    except LocalTokenNotFoundError as error:
        raise not_pushed(repo, folder, in_words(error), "Log in: hf auth login") from None
    except HfHubHTTPError as error:
        is_login = error.response is not None and error.response.status_code in (401, 403)
        remedy = "Log in with a token that may write: hf auth login" if is_login else "Look at what the hub says"
        raise not_pushed(repo, folder, in_words(error), remedy) from None
    except (httpx.HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise not_pushed(repo, folder, in_words(error), "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE") from None
    return str(made)


def not_pushed(repo: str, folder: Path, why: str, remedy: str) -> EngineError:
    return EngineError(
        f"--push {repo}: not uploaded: {why.rstrip('.')}.",
        remedy=f"The model is in {folder}. {remedy}; then: {shlex.join(['hf', 'upload', repo, str(folder)])}",
    )


def in_words(error: Exception) -> str:
    """What the hub or its client says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
