"""Chats and number drills made from the plain sources, in the chat format of the tokenizer's template.

The answers are quoted from the texts or computed, so nothing here has an author but the sources and this file.
"""

import ast
import random
import re
from collections.abc import Iterator

Document = tuple[str, str]  # name, text
SYSTEMS = ("You are a helpful assistant.", "You answer briefly.", "You are a careful reader of old books.")
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def format_chat(turns: list[tuple[str, str]], system: str | None) -> str:
    """Turns of (question, answer) as the chat template writes them."""
    lines = [f"<|im_start|>system\n{system}<|im_end|>\n"] if system else []
    for question, answer in turns:
        lines.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
    return "".join(lines)


def _sum_turn(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randrange(10 ** rng.randint(1, 4)), rng.randrange(10 ** rng.randint(1, 4))
    sign, total = ("+", left + right) if rng.random() < 0.6 else ("-", left - right)
    thought = f"<think>\n{left} {sign} {right} = {total}\n</think>\n\n" if rng.random() < 0.5 else EMPTY_THOUGHT
    question = rng.choice(("What is {}?", "Compute {}.", "{} = ?", "请计算 {}。", "How much is {}?"))
    return question.format(f"{left} {sign} {right}"), f"{thought}{total}"


def _poem_turn(document: str, rng: random.Random) -> tuple[str, str]:
    title, _, lines = document.partition("\n")
    question = rng.choice(("请背诵《{}》。", "《{}》怎么写?", "Please recite {}."))
    return question.format(title), EMPTY_THOUGHT + lines.strip()[:300]


def _entry_turn(document: str, rng: random.Random) -> tuple[str, str]:
    head, _, rest = document.partition(": ")
    question = rng.choice(("What does {} mean?", "Define {}.", "What do hackers call {}?"))
    return question.format(head.strip()[:60]), EMPTY_THOUGHT + rest.strip()[:400]


def _verse_turn(document: str, rng: random.Random) -> tuple[str, str]:
    lines = [line for line in document.splitlines() if len(line) > 40] or [document]
    words = rng.choice(lines).split()
    cut = min(len(words) // 2, 12)
    question = rng.choice(("Continue: {}", "How does this verse go on? {}", "Complete the verse: {}"))
    return question.format(" ".join(words[:cut])), EMPTY_THOUGHT + " ".join(words[cut : cut + 40])


def _code_turns(source: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.end_lineno or node.end_lineno - node.lineno > 16:
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0]
        if len(summary) > 20:
            indent = re.match(r"\s*", lines[node.lineno - 1])
            width = len(indent.group()) if indent else 0
            body = "\n".join(line[width:] for line in lines[node.lineno - 1 : node.end_lineno])
            question = rng.choice(("Write a Python function `{}`: {}", "Python: define {}. {}"))
            yield question.format(node.name, summary), f"{EMPTY_THOUGHT}```python\n{body}\n```"


def build_chats(plain: dict[str, list[Document]]) -> Iterator[Document]:
    """One to three turns a chat, each from one source document.

    A chat's name repeats its document's, so that a held-out text is not seen in training through its chat.
    The splitter looks at the whole name; the seed is fixed.
    """
    rng = random.Random(20260101)
    makers = {"poems": _poem_turn, "jargon": _entry_turn, "kjv": _verse_turn}
    limits = {"poems": 3500, "jargon": 2500, "kjv": 4000}
    for source, make in makers.items():
        documents = plain[source]
        for name, text in rng.sample(documents, min(limits[source], len(documents))):
            turns = [make(text, rng)]
            turns += [_sum_turn(rng)] if rng.random() < 0.3 else []
            yield name, format_chat(turns, rng.choice(SYSTEMS) if rng.random() < 0.5 else None)
    for name, text in plain["code"]:
        for turn in _code_turns(text, rng):
            yield name, format_chat([turn], rng.choice(SYSTEMS) if rng.random() < 0.3 else None)
    for number in range(3000):
        turns = [_sum_turn(rng) for _ in range(rng.randint(1, 3))]
        yield f"chat/{number}", format_chat(turns, rng.choice(SYSTEMS) if rng.random() < 0.3 else None)


def build_digits() -> Iterator[Document]:
    """Progressions, tables and dates: text where the next digit can be worked out."""
    rng = random.Random(20260102)
    for number in range(2500):
        start, step = rng.randrange(1000), rng.randint(1, 50)
        kind = number % 4
        if kind == 0:
            text = ", ".join(str(start + step * index) for index in range(24))
        elif kind == 1:
            text = "\n".join(f"{step} x {index} = {step * index}" for index in range(1, 16))
        elif kind == 2:
            text = "\n".join(f"{1900 + start % 150}-{month:02d}-{step % 28 + 1:02d}" for month in range(1, 13))
        else:
            text = "\n".join(f"{value}\t{value * value}\t{value**3}" for value in range(step, step + 10))
        yield f"digits/{number}", text + "\n"
