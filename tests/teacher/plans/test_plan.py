from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from receipts.errors import PlanError, SnapshotError
from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Example, Plan, load_plan

TEMPLATE = (
    "{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, *, vocabulary: int = 300) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, then the other dogs"], trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "chat_template": TEMPLATE})
    )
    return folder


def load(tmp_path: Path, folder: Path, *lines: Any, raw: bytes | None = None, **kwargs: Any) -> Plan:
    path = tmp_path / "own.jsonl"
    path.write_bytes(raw if raw is not None else "".join(json.dumps(line) + "\n" for line in lines).encode())
    return load_plan(path, folder, **{"vocabulary_rows": 400, **kwargs})


def test_text_chat_and_ids_become_examples(tmp_path: Path, folder: Path) -> None:
    chat = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "yo"}]
    plan = load(
        tmp_path,
        folder,
        {"text": "the dog", "name": "a", "kind": "prose"},
        {"chat": chat},
        {"token_ids": [5, 6, 7, 8], "calls": [3, 1]},
        call_shape="prefill",
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [e.name for e in plan.examples] == ["a", "line-2", "line-3"]
    assert [e.kind for e in plan.examples] == ["prose", "chat", "tokens"]
    assert list(plan.examples[0].token_ids) == tokenizer.encode("the dog").ids
    assert plan.examples[1].text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert tokenizer.decode(list(plan.examples[1].token_ids), skip_special_tokens=False) == plan.examples[1].text
    assert plan.examples[1].token_ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert plan.examples[2].token_ids == (5, 6, 7, 8)
    assert plan.examples[2].text is None
    assert [e.calls for e in plan.examples] == [
        (len(plan.examples[0].token_ids),), (len(plan.examples[1].token_ids),), (3, 1)
    ]  # fmt: skip


def test_special_tokens_in_plain_text_are_parsed_and_none_is_added(tmp_path: Path, folder: Path) -> None:
    plan = load(tmp_path, folder, {"text": "<|im_end|>"})
    assert len(plan.examples[0].token_ids) == 1


def test_truncation_left_in_the_tokenizer_file_does_not_cut_a_text(tmp_path: Path, folder: Path) -> None:
    before = load(tmp_path, folder, {"text": "the lazy dog jumps"}).examples[0].token_ids
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load(tmp_path, folder, {"text": "the lazy dog jumps"}).examples[0].token_ids == before


def test_a_template_file_comes_before_the_one_in_the_config(tmp_path: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% break %}{% endfor %}")
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert load(tmp_path, folder, {"chat": chat}).examples[0].text == "[a]"


def test_a_named_list_of_templates_gives_its_default(tmp_path: Path, folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ messages | tojson }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = [{"role": "user", "content": "<é>"}]
    assert load(tmp_path, folder, {"chat": chat}).examples[0].text == '[{"role": "user", "content": "<é>"}]'


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PlanError, match=r"own.jsonl:1: .*chat template refused"):
        load(tmp_path, folder, {"chat": [{"role": "user", "content": "a"}]})


def test_a_template_that_refuses_a_chat_says_why_and_where(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(PlanError, match=r"own.jsonl:2: .*no tools here"):
        load(tmp_path, folder, {"text": "a"}, {"chat": [{"role": "tool", "content": "a"}]})


def test_a_chat_without_a_template_is_refused_and_texts_are_not(tmp_path: Path, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    load(tmp_path, folder, {"text": "a"})
    with pytest.raises(PlanError, match=r"own.jsonl:1: .*chat_template"):
        load(tmp_path, folder, {"chat": [{"role": "user", "content": "a"}]})


def test_a_folder_without_a_tokenizer_is_refused_unless_ids_are_given(tmp_path: Path, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    load(tmp_path, folder, {"token_ids": [1]})
    with pytest.raises(SnapshotError, match=r"tokenizer.json: expected the file in"):
        load(tmp_path, folder, {"text": "a"})
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SnapshotError, match=r"tokenizer.json: expected a tokenizer"):
        load(tmp_path, folder, {"text": "a"})


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", r"own.jsonl: expected at least one example, got an empty plan"),
        (b"\n  \n", r"own.jsonl: expected at least one example, got an empty plan"),
        (b'{"text": "a"}\n{"text": ', r"own.jsonl:2: expected a JSON object, got bad JSON"),
        (b'{"text": "\xff"}', r"own.jsonl:1: expected a JSON object, got bad JSON"),
        (b'["a"]', r"own.jsonl:1: expected a JSON object, got list"),
        (b"[" * 100_000, r"own.jsonl:1: expected a JSON object, got bad JSON"),
        (b'{"text": "a", "text": "b"}', r"own.jsonl:1: .*key 'text' is given twice"),
        (b'{"token_ids": [NaN]}', r"own.jsonl:1: .*NaN is not JSON"),
        (b'{"txt": "a"}', r"own.jsonl:1: expected keys among .*, got \['txt'\]"),
        (b'{"name": "a"}', r"own.jsonl:1: expected exactly one of text, chat and token_ids, got none"),
        (b'{"text": "a", "token_ids": [1]}', r"exactly one of .*, got \['text', 'token_ids'\]"),
        (b'{"text": ""}', r"own.jsonl:1: text: expected text, got nothing"),
        (b'{"text": 5}', r"own.jsonl:1: text: expected text, got int"),
        (b'{"text": "\\ud83d"}', r"own.jsonl:1: text: .*half a surrogate pair at 0"),
        (b'{"chat": []}', r"own.jsonl:1: chat: expected a list of messages, got '\[\]'"),
        (b'{"chat": [{"role": "user"}]}', r"chat\[0\]: expected the keys role and content, got \['role'\]"),
        (b'{"chat": [{"role": "user", "content": 1}]}', r"chat\[0\].content: expected text, got int"),
        (b'{"token_ids": []}', r"own.jsonl:1: token_ids: expected a list of whole numbers, got '\[\]'"),
        (b'{"token_ids": [1, true]}', r"token_ids\[1\]: expected a whole number of at least 0, got True"),
        (b'{"token_ids": [1.0]}', r"token_ids\[0\]: expected a whole number of at least 0, got 1.0"),
        (b'{"token_ids": [-1]}', r"token_ids\[0\]: expected a whole number of at least 0, got -1"),
        (b'{"token_ids": [1, 400]}', r"own.jsonl:1: token 1: expected an id below 400, got 400"),
        (b'{"token_ids": [1, 2], "calls": [1, 0, 1]}', r"calls\[1\]: expected a whole number of at least 1, got 0"),
        (b'{"token_ids": [1, 2], "calls": [1]}', r"own.jsonl:1: expected calls that sum to 2 tokens, got 1"),
        (b'{"token_ids": [1, 2], "calls": "1"}', r"calls: expected a list of whole numbers, got '1'"),
        (b'{"token_ids": [1], "name": "x"}\n{"token_ids": [1], "name": "x"}', r"own.jsonl:2: .*'x' of own.jsonl:1"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_place(tmp_path: Path, folder: Path, raw: bytes, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        load(tmp_path, folder, raw=raw)
    assert "\n" not in str(caught.value)


def test_an_example_longer_than_the_cache_is_refused(tmp_path: Path, folder: Path) -> None:
    load(tmp_path, folder, {"token_ids": [1] * 8}, max_sequence_tokens=8)
    with pytest.raises(PlanError, match=r"own.jsonl:1: expected at most 8 tokens \(the cache's capacity\), got 9"):
        load(tmp_path, folder, {"token_ids": [1] * 9}, max_sequence_tokens=8)
    for capacity in (0, 4097):
        with pytest.raises(PlanError, match=r"cache capacity: expected 1 to 4096 tokens"):
            load(tmp_path, folder, {"token_ids": [1]}, max_sequence_tokens=capacity)


def test_a_missing_plan_file_is_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"none.jsonl: cannot be read: No such file"):
        load_plan(folder / "none.jsonl", folder, vocabulary_rows=400)


def test_values_made_in_python_are_held_to_the_same_rules() -> None:
    def example(**changes: Any) -> Example:
        return Example(**{"name": "a", "kind": "k", "token_ids": (1, 2), "calls": (2,), "text": None, **changes})

    with pytest.raises(PlanError, match="sum to its 2 tokens, got 3"):
        example(calls=(2, 1))
    with pytest.raises(PlanError, match="at least one token, got 0"):
        example(calls=(2, 0))
    with pytest.raises(PlanError, match="at least one token, got none"):
        example(token_ids=(), calls=())
    shape = CallShape.parse("prefill")
    with pytest.raises(PlanError, match="at least one example"):
        Plan(examples=(), source=None, call_shape=shape)
    with pytest.raises(PlanError, match="'a' twice"):
        Plan(examples=(example(), example()), source=None, call_shape=shape)


def test_the_record_holds_ids_calls_and_text_digests_and_no_path(tmp_path: Path, folder: Path) -> None:
    plan = load(tmp_path, folder, {"text": "dog"}, {"token_ids": [9, 8], "calls": [1, 1]}, call_shape="chunks:2")
    record = plan.to_record()
    assert record["schema"] == "source-teacher/plan/v1"
    assert record["examples"][0]["text_sha256"] == hashlib.sha256(b"dog").hexdigest()
    assert record["examples"][1] == {
        "name": "line-2", "kind": "tokens", "token_ids": [9, 8], "calls": [1, 1], "text_sha256": None
    }  # fmt: skip
    assert record["source"]["sha256"] == hashlib.sha256((tmp_path / "own.jsonl").read_bytes()).hexdigest()
    assert record["positions"] == plan.positions
    assert str(tmp_path) not in json.dumps(record)
    assert json.loads(json.dumps(record)) == record  # plain JSON types alone
    again = load(tmp_path, folder, {"text": "dog"}, {"token_ids": [9, 8], "calls": [1, 1]}, call_shape="chunks:2")
    assert again.to_record() == record


def test_reshaping_changes_calls_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    plan = load(tmp_path, folder, {"text": "the dog jumps"}, {"token_ids": [9, 8], "calls": [1, 1]})
    one = plan.reshaped(CallShape.parse("prefill"))
    assert [e.token_ids for e in one.examples] == [e.token_ids for e in plan.examples]
    assert all(len(e.calls) == 1 for e in one.examples)


def test_the_built_in_plan_covers_what_it_promises(folder: Path) -> None:
    plan = load_plan(None, folder, vocabulary_rows=400)
    assert len(plan.examples) >= 16
    assert {e.kind for e in plan.examples} == {"prose", "code", "chat", "cjk", "digits", "whitespace", "emoji"}
    size_bytes = sum(len((e.text or "").encode()) for e in plan.examples)
    assert 8_000 <= size_bytes <= 11_000
    assert all(e.calls[0] > 1 and e.calls[-1] == 1 for e in plan.examples)  # each measures prefill and decode
    decoded = sum(calls == 1 for e in plan.examples for calls in e.calls)
    assert decoded >= 24 * 16
    assert max(len(e.token_ids) for e in plan.examples) <= 1024
