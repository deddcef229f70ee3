"""Engines that can be audited, by name; each is imported only in the process that runs it."""

CANDIDATES: dict[str, str] = {
    "llama_cpp": "teacher.candidates.llama_cpp:LlamaCpp",
}
"""Name of an engine -> `module:class` of its LogitSource. A new engine is one module and one line here."""
