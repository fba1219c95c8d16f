"""Finds the folder on disk of a model that the user names by a folder or a hub id.

Downloads follow the environment variables of the hub's library: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN
and HF_ENDPOINT.
"""

import re
from pathlib import Path

from jaxspec.errors import LoadError, UsageError, one_line, shown

ALLOWED_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
"""The only files that are downloaded: no pickles, no code."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or the snapshot of a hub id, downloaded if it is not cached."""
    named = folder_or_hub_id(source, revision)
    return named if isinstance(named, Path) else _snapshot(named, revision)


def folder_or_hub_id(source: str | Path, revision: str | None = None) -> Path | str:
    """The folder, or the hub id if there is no such folder. A name that is neither is refused.
    This function downloads nothing and does not import jax."""
    try:
        folder = Path(source).expanduser()
        is_folder, is_file = bool(source) and folder.is_dir(), folder.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or the home of no user
        raise LoadError(
            f"{shown(str(source))} cannot be the name of a folder ({one_line(error)}); expected a "
            "checkpoint folder or a hub id"
        ) from error
    if is_folder:
        if revision is not None:
            raise UsageError(
                f"revision {revision!r} of {source}, which is a folder; only hub ids have "
                "revisions: leave it out"
            )
        return folder
    if is_file:
        raise LoadError(f"{source} is a file, expected the folder of a checkpoint; name its folder")
    return _hub_id(str(source))


def _hub_id(source: str) -> str:
    if not source:
        raise UsageError("no model named: expected a checkpoint folder or a hub id")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise LoadError(f"no such folder: {source}; expected a checkpoint folder or a hub id")
    from huggingface_hub.errors import HFValidationError  # only now: it takes a third of a second
    from huggingface_hub.utils import validate_repo_id

    try:
        if not HUB_ID.fullmatch(source):
            raise HFValidationError("expected owner/name")
        validate_repo_id(source)
    except HFValidationError as error:
        raise LoadError(
            f"{source!r} is neither a folder nor a hub id ({one_line(error)}); "
            "expected something like Qwen/Qwen3-8B"
        ) from error
    return source


def _snapshot(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    named = f"{hub_id} at revision {revision}" if revision else hub_id
    try:
        # Offline too: the hub's library uses the patterns to check the cached snapshot.
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=ALLOWED_FILES))
    except errors.LocalEntryNotFoundError as error:
        raise LoadError(_not_cached(hub_id, named)) from error
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{named} is gated; expected HF_TOKEN of an account with access: ask for it at the "
            "model's page, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadError(
            f"no folder {hub_id} and no such model on the hub; check the spelling, or set "
            "HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LoadError(f"{hub_id} has no revision {revision}; name a branch or commit") from error
    except Exception as error:  # the kinds depend on the library that downloads
        raise LoadError(f"cannot download {named}: {one_line(error)}") from error


def _not_cached(hub_id: str, named: str) -> str:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return (
        f"no folder {hub_id}, {named} is not complete in the cache {constants.HF_HUB_CACHE}, and "
        f"{why}; run `hf download {hub_id}` with a connection"
    )
