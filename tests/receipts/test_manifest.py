from pathlib import Path

import pytest

from receipts.errors import (
    DigestMismatchError,
    MissingFileError,
    ReceiptFormatError,
    SnapshotError,
    UnexpectedFileError,
)
from receipts.manifest import FileEntry, SnapshotManifest, build_manifest, compare


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    for name, text in {
        "a.txt": "one", "a/b": "two", "a-b": "", ".gitignore": "four", "model.sig": "sig", ".git/x": "x",
        "sub/.gitignore": "five", "Zeta κ.bin": "κ",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_root_digest_is_the_subject_that_model_signing_signs(folder):
    # Made with the package model-signing 1.1.1, signature and git files left out, for these very files.
    expected = "4cfa5b44a88a1dcd462cc40f42988328fd5e9858300cc976bd2637ab2818b52a"
    manifest = build_manifest(folder)
    assert manifest.root_digest.hex == expected
    assert [entry.path for entry in manifest.entries] == ["Zeta κ.bin", "a/b", "a-b", "a.txt", "sub/.gitignore"]


def test_every_byte_is_counted_as_it_is_read(folder):
    seen = []
    manifest = build_manifest(folder, on_bytes=seen.append)
    assert sum(seen) == sum(entry.size_bytes for entry in manifest.entries)


def test_a_manifest_survives_its_dictionary_form(folder):
    manifest = build_manifest(folder)
    assert SnapshotManifest.from_dict(manifest.to_dict()) == manifest
    with pytest.raises(DigestMismatchError, match="root sha256"):
        SnapshotManifest.from_dict({**manifest.to_dict(), "root_sha256": "0" * 64})
    form = manifest.to_dict()
    with pytest.raises(ReceiptFormatError, match="once and in order"):
        SnapshotManifest.from_dict({**form, "entries": form["entries"][::-1]})


def test_a_changed_a_missing_and_a_new_file_are_named(folder):
    before = build_manifest(folder)
    compare(before, build_manifest(folder))
    (folder / "a.txt").write_text("onf")
    with pytest.raises(DigestMismatchError, match=r"a\.txt: expected sha256 7692"):
        compare(before, build_manifest(folder))
    (folder / "a.txt").unlink()
    with pytest.raises(MissingFileError, match=r"a\.txt"):
        compare(before, build_manifest(folder))
    (folder / "a.txt").write_text("one")
    (folder / "new").write_text("")
    with pytest.raises(UnexpectedFileError, match="new"):
        compare(before, build_manifest(folder))


def test_a_hub_cache_with_links_into_its_blobs_is_read_under_its_own_names(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_text("{}")
    (snapshot / "config.json").symlink_to(Path("..", "..", "blobs", "1234"))
    manifest = build_manifest(snapshot)
    assert [entry.path for entry in manifest.entries] == ["config.json"]
    assert manifest.entries[0].size_bytes == 2


def test_links_that_lead_nowhere_or_out_are_refused(folder, tmp_path):
    (folder / "gone").symlink_to("nothing")
    with pytest.raises(SnapshotError, match="gone: expected a link to a file, got one that leads nowhere"):
        build_manifest(folder)
    (folder / "gone").unlink()
    (tmp_path / "secret").write_text("x")
    (folder / "out").symlink_to("../secret")
    with pytest.raises(SnapshotError, match="out: expected a link within the snapshot"):
        build_manifest(folder)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "next\x85line", "line\u2028separator"])
def test_names_that_no_record_can_hold_are_refused(folder, name):
    (folder / name).write_text("")
    with pytest.raises(SnapshotError, match="control characters"):
        build_manifest(folder)


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a//b", "./a", "a/", "", ".", "a/../b", "two\nlines"])
def test_a_recorded_path_out_of_the_folder_is_refused(path):
    with pytest.raises(ReceiptFormatError, match="expected a plain path within the folder"):
        FileEntry(path=path, size_bytes=1, sha256="ab" * 32)


def test_a_recorded_size_is_not_negative():
    with pytest.raises(ReceiptFormatError, match="a: expected a size of at least 0, got -1"):
        FileEntry(path="a", size_bytes=-1, sha256="ab" * 32)


def test_git_files_are_left_out_at_the_top_alone(folder):
    # As model-signing 1.1.1 does: these four names, no other that starts with .git, and none below the top.
    before = build_manifest(folder)
    for name in (".gitattributes", ".github/workflow.yml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    assert build_manifest(folder) == before
    (folder / ".gitmodules").write_text("m")
    added = "34faf0adfef823d448288eac3f79daf5ef4aa9370fe8e4823743d7e2857504ac"  # by that package
    assert build_manifest(folder).root_digest.hex == added
