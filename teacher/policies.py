"""Find the policy a run is judged by: a file, a shipped one by name, or the shipped one for the file's type."""

from __future__ import annotations

from pathlib import Path

from receipts.errors import PolicyError
from receipts.policy import Policy
from teacher.gguf.file import GgufFile

# In an installed package the files lie inside it; in a source tree they lie where people edit them.
_FOLDERS = (
    Path(__file__).resolve().parent / "shipped_policies",
    Path(__file__).resolve().parents[1] / "ci" / "policies",
)
# general.file_type as llama.cpp numbers it.
_BY_FILE_TYPE = {0: "f32", 1: "f32", 32: "f32", 7: "q8_0", 18: "q6_k", 15: "q4_k_m", 2: "q4_0"}


def shipped_policies() -> dict[str, Path]:
    """Return the shipped policies by name."""
    return {path.stem: path for folder in reversed(_FOLDERS) for path in sorted(folder.glob("*.toml"))}


def find_policy(policy: str | Path | None, gguf: GgufFile) -> tuple[Policy, bytes]:
    """Return a policy and the bytes of its file.

    Args:
        policy: a file, a shipped policy's name such as "q8_0", or None for the one that fits the GGUF's type.
        gguf: the file under audit.

    Raises:
        PolicyError: there is no such policy, or it cannot be used.
    """
    shipped = shipped_policies()
    known = ", ".join(sorted(shipped))
    if policy is None:
        kind = gguf.metadata.get("general.file_type")
        name = _BY_FILE_TYPE.get(kind) if isinstance(kind, int) else None
        if name not in shipped:
            raise PolicyError(
                f"policy: expected one for a GGUF of file type {kind}, got none; name a file or one of {known}"
            )
        path = shipped[name]
    else:
        path = Path(policy) if str(policy) not in shipped else shipped[str(policy)]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: expected a policy file or one of {known}, got '{error.strerror}'") from error
    return Policy.parse(data, path.name), data
