"""The files of a model folder, with the digest of each and one for all.

The root digest is that of the OpenSSF model-signing v1 manifest: SHA-256 over the raw digests of all files, in the
order of their paths, compared part by part. It is the digest of the subject that an existing `model.sig` names. As
there, the signature itself and the top-level git files are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from receipts.digest import Digest, sha256_bytes, sha256_file
from receipts.errors import (
    DigestMismatchError,
    MissingFileError,
    ReceiptFormatError,
    SnapshotError,
    UnexpectedFileError,
)
from receipts.plain import from_plain

IGNORED = frozenset({".git", ".gitattributes", ".github", ".gitignore", "model.sig"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # line separators end a line for many readers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file.

    Attributes:
        path: relative, with forward slashes.
        size_bytes: its size.
        sha256: digest of its bytes, in hex.
    """

    path: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if "/".join(parts) != self.path or not parts or {"..", "/"} & set(parts) or _CONTROL.search(self.path):
            raise ReceiptFormatError(f"manifest: expected a plain path within the folder, got {self.path!r:.200}")
        if self.size_bytes < 0:
            raise ReceiptFormatError(f"manifest {self.path}: expected a size of at least 0, got {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    """All files of a folder, in the order of the root digest.

    Attributes:
        entries: one for each file.
    """

    entries: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        paths = [PurePosixPath(entry.path).parts for entry in self.entries]
        if paths != sorted(set(paths)):
            raise ReceiptFormatError("manifest: expected each path once and in order, got another order or one twice")

    @property
    def root_digest(self) -> Digest:
        """SHA-256 over the raw digests of all files."""
        raw = (Digest(algorithm="sha256", hex=entry.sha256).raw for entry in self.entries)
        return sha256_bytes(b"".join(raw))

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as plain values, its root digest among them."""
        return {"root_sha256": self.root_digest.hex, "entries": [asdict(entry) for entry in self.entries]}

    @staticmethod
    def from_dict(form: Mapping[str, Any]) -> SnapshotManifest:
        """Read a manifest back.

        Raises:
            ReceiptFormatError: a field is missing, unknown or of another type.
            DigestMismatchError: the entries do not give the root digest.
        """
        body = dict(form)
        root = body.pop("root_sha256", None)
        manifest = from_plain(SnapshotManifest, body, "manifest")
        if manifest.root_digest.hex != root:
            raise DigestMismatchError(f"manifest: expected root sha256 {root}, got {manifest.root_digest.hex}")
        return manifest


def build_manifest(folder: Path, *, on_bytes: Callable[[int], None] | None = None) -> SnapshotManifest:
    """Hash every file of a folder, each in one read.

    Args:
        folder: the model folder.
        on_bytes: told the size of each piece as it is read.

    Raises:
        SnapshotError: a file cannot be read, has a name no record can hold, or is a link out of the folder.
    """
    entries = []
    try:
        paths = sorted(_files(folder), key=lambda path: path.relative_to(folder).parts)
    except OSError as error:
        raise SnapshotError(f"{error.filename}: expected a readable folder, got '{error.strerror}'") from error
    for path in paths:
        name = path.relative_to(folder).as_posix()
        try:
            digest, size = sha256_file(path, on_bytes)
        except OSError as error:
            raise SnapshotError(f"{name}: expected a readable file, got '{error.strerror}'") from error
        entries.append(FileEntry(path=name, size_bytes=size, sha256=digest.hex))
    return SnapshotManifest(entries=tuple(entries))


def compare(before: SnapshotManifest, after: SnapshotManifest) -> None:
    """Say that a folder still holds the same files.

    Raises:
        DigestMismatchError, MissingFileError, UnexpectedFileError: names the first file that differs.
    """
    old = {entry.path: entry for entry in before.entries}
    new = {entry.path: entry for entry in after.entries}
    for path, entry in old.items():
        if path not in new:
            raise MissingFileError(f"{path}: expected the file as at the start, got none")
        if new[path] != entry:
            raise DigestMismatchError(
                f"{path}: expected sha256 {entry.sha256} of {entry.size_bytes} bytes as at the start, got"
                f" {new[path].sha256} of {new[path].size_bytes} bytes"
            )
    added = [path for path in new if path not in old]
    if added:
        raise UnexpectedFileError(f"{added[0]}: expected only the files there were at the start, got a new one")


def _files(folder: Path) -> Iterator[Path]:
    places = _places(folder)
    pending = [folder]
    while pending:
        for path in pending.pop().iterdir():
            name = path.relative_to(folder).as_posix()
            if name in IGNORED:
                continue
            try:
                name.encode("utf-8")
            except UnicodeEncodeError as error:
                raise SnapshotError(f"{name!r}: expected a file name in UTF-8, got other bytes") from error
            if _CONTROL.search(name):
                raise SnapshotError(f"{name!r}: expected a file name without control characters")
            _verify_inside(path, name, places)
            if path.is_dir():
                if path.is_symlink():
                    raise SnapshotError(f"{name}: expected a folder, got a link to one")
                pending.append(path)
            elif path.is_file():
                yield path
            else:
                raise SnapshotError(f"{name}: expected a file or a folder, got another kind")


def _places(folder: Path) -> tuple[Path, ...]:
    """Return where files may really lie: the folder, and the blobs beside `snapshots` in the hub's cache."""
    real = folder.resolve()
    if real.parent.name == "snapshots":
        return real, real.parent.parent / "blobs"
    return (real,)


def _verify_inside(path: Path, name: str, places: tuple[Path, ...]) -> None:
    if not path.is_symlink():
        return
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise SnapshotError(f"{name}: expected a link to a file, got one that leads nowhere") from error
    if not any(target.is_relative_to(place) for place in places):
        raise SnapshotError(f"{name}: expected a link within the snapshot or the hub cache, got one to {target}")
