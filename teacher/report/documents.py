"""Documents of a finished run, from its receipts alone."""

from __future__ import annotations

from pathlib import Path

from receipts.chain import RunCheck, verify_run
from receipts.errors import OutputError
from receipts.files import write_atomic


def write_documents(
    run_folder: Path, *, html: Path | None, junit: Path | None, markdown: Path | None
) -> tuple[Path, ...]:
    """Check a run folder and write the documents that are asked for; return their paths.

    All are made before the first is written, and each is there whole or not at all.

    Args:
        run_folder: a finished run.
        html, junit, markdown: files to write; None writes none.

    Raises:
        OutputError: a file would lie within the run folder, two are the same, or a place cannot be written to.
        IntegrityError, InputError: the run folder is not whole; as `receipts.chain.verify_run`.
    """
    run = verify_run(run_folder)
    wanted = [
        (path, kind) for path, kind in ((html, _html), (junit, _junit), (markdown, _markdown)) if path is not None
    ]
    verify_places(run_folder, [path for path, _ in wanted])
    made = [(path, kind(run).encode()) for path, kind in wanted]
    for path, data in made:
        write_atomic(path, data)
    return tuple(path for path, _ in made)


def verify_places(run_folder: Path, paths: list[Path]) -> None:
    """Refuse files that cannot be written, or lie within the run folder, and one file for two documents.

    The run folder need not exist yet: a run takes long, and these are known before it.

    Raises:
        OutputError: names the file.
    """
    places = [path.parent.resolve() / path.name for path in paths]
    for path, at in zip(paths, places, strict=True):
        if any(_is_same(folder, run_folder) for folder in at.parents):
            raise OutputError(f"{path}: expected a place outside {run_folder}, which holds its receipts alone")
        if not at.parent.is_dir():
            raise OutputError(f"{path}: expected a folder {at.parent}, got none")
    for path, at in zip(paths, places, strict=True):
        if places.count(at) > 1:
            raise OutputError(f"{path}: expected a file for each document, got one for two")


def _is_same(folder: Path, other: Path) -> bool:
    if folder.exists() and other.exists():
        return folder.samefile(other)  # a file system may not tell upper from lower case
    return folder == other.resolve()


# Each of these loads what it needs and no more: a Markdown summary needs neither Jinja nor Matplotlib.
def _html(run: RunCheck) -> str:
    from teacher.report.html import render_html

    return render_html(run)


def _junit(run: RunCheck) -> str:
    from teacher.report.junit import render_junit

    return render_junit(run)


def _markdown(run: RunCheck) -> str:
    from teacher.report.markdown import render_markdown

    return render_markdown(run)
