"""A model folder from what the user named: a folder of theirs, or a hub id in the hub's cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from receipts.errors import SnapshotError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in other formats are no part of what is verified, and need not be fetched.
_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.sig", "README.md", "LICENSE*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a snapshot comes from.

    Attributes:
        name: hub id, or the folder's own name.
        revision: revision asked for; None for a folder.
        commit: commit it was resolved to, once; None for a folder.
    """

    name: str
    revision: str | None
    commit: str | None


def locate(source: str | Path, *, revision: str | None = None, allow_download: bool = False) -> tuple[Path, Origin]:
    """Return the folder a name stands for.

    A folder is taken as it is. A hub id is looked up in the hub's cache; with `allow_download` its revision is first
    resolved to a commit, and what is missing of that commit is fetched.

    Raises:
        SnapshotError: there is no such folder, or the cache lacks it and downloading is not allowed.
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise SnapshotError(f"{source}: expected no revision with a folder, got {revision!r}")
        return folder, Origin(name=folder.resolve().name, revision=None, commit=None)
    if folder.exists() or not _HUB_ID.fullmatch(str(source)):
        raise SnapshotError(f"{source}: expected a model folder or a hub id such as org/name, got neither")
    return _from_hub(str(source), revision or "main", allow_download)


def _from_hub(repo: str, revision: str, allow_download: bool) -> tuple[Path, Origin]:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        commit = HfApi().model_info(repo, revision=revision).sha if allow_download else revision
        found = snapshot_download(
            repo, revision=commit, local_files_only=not allow_download, allow_patterns=list(_PATTERNS)
        )
    except LocalEntryNotFoundError as error:
        raise SnapshotError(
            f"{repo}: expected a folder of that name or revision {revision} in the hub's cache, got neither (allow"
            " the download with --download)"
        ) from error
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise SnapshotError(f"{repo}: expected revision {revision} from the hub, got '{error}'") from error
    folder = Path(found)
    return folder, Origin(name=repo, revision=revision, commit=folder.name)
