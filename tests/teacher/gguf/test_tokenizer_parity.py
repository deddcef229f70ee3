import importlib.util
import json

import pytest

from receipts.errors import GgufError
from support.gguf_tools import edit_gguf
from teacher.gguf.file import read_gguf
from teacher.gguf.tokenizer_parity import check_tokenizer, corpus
from teacher.snapshot.tokenizer import SnapshotTokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp (llama.cpp)"
)


@pytest.fixture
def check(tiny, tiny_gguf, tmp_path):
    def run(**metadata):
        keys = {key if key.startswith("general") else f"tokenizer.{key}": value for key, value in metadata.items()}
        return check_tokenizer(tiny, edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata=keys))

    return run


def test_the_models_own_file_agrees_on_every_text(tiny, tiny_gguf):
    found = check_tokenizer(tiny, tiny_gguf)
    assert found.parity.status == "match"
    assert found.parity.texts > 180
    assert found.parity.tokens > 3000
    assert found.vocabulary_rows - found.real_vocabulary == 7


def test_the_corpus_has_what_breaks_tokenizers(tiny):
    texts = "".join(corpus(SnapshotTokenizer(tiny).added_tokens()))
    for sample in ("<|im_start|>", "你好", "🙂", "1234567890", "\t\t", "\r\n", "\u0301", "아침"):
        assert sample in texts


def test_another_pre_tokenizer_shows_the_first_text_it_cuts_otherwise(check):
    found = check(**{"ggml.pre": "default"})
    assert found.parity.status == "differs"
    assert "expected ids" in found.parity.first_difference


def test_a_special_token_that_is_no_special_token_any_more_is_found(check, tiny_gguf):
    kinds = list(read_gguf(tiny_gguf).metadata["tokenizer.ggml.token_type"])
    texts = read_gguf(tiny_gguf).metadata["tokenizer.ggml.tokens"]
    kinds[texts.index("<|im_start|>")] = 1
    found = check(**{"ggml.token_type": kinds})
    assert found.parity.status == "differs"
    assert "im_start" in found.parity.first_difference


def test_two_exchanged_entries_are_found(check, tiny_gguf):
    texts = list(read_gguf(tiny_gguf).metadata["tokenizer.ggml.tokens"])
    left, right = texts.index("a"), texts.index("b")
    texts[left], texts[right] = texts[right], texts[left]
    assert check(**{"ggml.tokens": texts}).parity.status == "differs"


def test_fewer_tokens_than_the_tokenizer_has_are_refused_with_both_numbers(check, tiny_gguf):
    header = read_gguf(tiny_gguf).metadata
    texts, kinds = list(header["tokenizer.ggml.tokens"]), list(header["tokenizer.ggml.token_type"])
    with pytest.raises(GgufError, match=rf"at least the {len(texts) - 7} tokens .*, got {len(texts) - 8}"):
        check(**{"ggml.tokens": texts[:-8], "ggml.token_type": kinds[:-8]})


def test_other_flags_are_noted_with_both_values(check):
    found = check(**{"ggml.add_bos_token": True})
    assert any("add_bos is True, the snapshot's add_bos_token is False" in note for note in found.notes)


def test_an_engine_that_does_not_compose_characters_is_noted_and_not_blamed_on_the_file(tiny, tiny_gguf):
    assert json.loads((tiny / "tokenizer.json").read_text())["normalizer"] == {"type": "NFC"}
    (note,) = check_tokenizer(tiny, tiny_gguf).notes
    assert "does not compose characters" in note


def test_decomposed_text_is_excused_for_the_lacking_normaliser_alone(tiny, tiny_gguf, check, monkeypatch):
    monkeypatch.setattr("teacher.gguf.tokenizer_parity.corpus", lambda added: ("e\u0301te\u0301 हिन्दी में लिखा हुआ पाठ",))
    assert check_tokenizer(tiny, tiny_gguf).parity.status == "match"
    found = check(**{"ggml.pre": "qwen2"})  # parts marks from their letters, which the lacking normaliser does not
    assert found.parity.status == "differs"


def test_another_normaliser_than_nfc_is_a_difference(snapshot, tiny_gguf):
    form = json.loads((snapshot / "tokenizer.json").read_text())
    (snapshot / "tokenizer.json").write_text(json.dumps({**form, "normalizer": {"type": "Lowercase"}}))
    assert check_tokenizer(snapshot, tiny_gguf).parity.status == "differs"


@pytest.mark.parametrize("more", [1, 40])
def test_more_rows_than_the_config_has_are_padding_and_noted(check, tiny_gguf, more):
    header = read_gguf(tiny_gguf).metadata
    texts, kinds = list(header["tokenizer.ggml.tokens"]), list(header["tokenizer.ggml.token_type"])
    texts += [f"[PAD{len(texts) + i}]" for i in range(more)]
    found = check(**{"ggml.tokens": texts, "ggml.token_type": kinds + [5] * more})
    assert found.parity.status == "match"
    assert found.vocabulary_rows - found.real_vocabulary == 7 + more
    assert any(f"expected {len(kinds)} rows of logits as config.json has, got {len(texts)}" in n for n in found.notes)


def test_one_row_of_padding_less_is_noted(check, tiny_gguf):
    header = read_gguf(tiny_gguf).metadata
    texts, kinds = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"]
    found = check(**{"ggml.tokens": list(texts[:-1]), "ggml.token_type": list(kinds[:-1])})
    assert found.parity.status == "match"
    assert any(f"expected {len(texts)} rows" in note for note in found.notes)


def test_an_exchanged_pair_that_no_text_uses_is_found_in_the_table(check, tiny, tiny_gguf):
    tokenizer = SnapshotTokenizer(tiny)
    used = {i for text in corpus(tokenizer.added_tokens()) for i in tokenizer.encode_text(text)}
    left, right = [i for i in tokenizer.vocabulary() if i not in used][:2]
    texts = list(read_gguf(tiny_gguf).metadata["tokenizer.ggml.tokens"])
    texts[left], texts[right] = texts[right], texts[left]
    found = check(**{"ggml.tokens": texts})
    assert found.parity.status == "differs"
    assert f"token {min(left, right)}: expected" in found.parity.first_difference


def test_a_file_the_engine_cannot_read_is_refused_before_anything_is_compared(tiny, tmp_path):
    (tmp_path / "m.gguf").write_text("no model")
    with pytest.raises(GgufError, match=r"expected llama\.cpp to load it"):
        check_tokenizer(tiny, tmp_path / "m.gguf")
