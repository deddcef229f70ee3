import importlib.util
import json

import pytest
from support.gguf_tools import edit_gguf

from receipts.errors import GgufError
from teacher.gguf_file import read_gguf
from teacher.tokenizer import SnapshotTokenizer
from teacher.tokenizer_parity import check_tokenizer, corpus

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
    for sample in ("<|im_start|>", "你好", "🙂", "1234567890", "\t\t", "\r\n", "\u0301", "한"[:0] + "아침"):
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


def test_a_template_that_differs_by_a_newline_is_noted_with_its_place(check, tiny):
    template = (tiny / "chat_template.jinja").read_text()
    found = check(chat_template=template.replace("\n", "", 1))
    assert found.parity.status == "match"
    place = template.index("\n")
    assert any(f"chat template differs from the snapshot's at character {place}" in note for note in found.notes)


def test_other_flags_are_noted_with_both_values(check):
    found = check(**{"ggml.eos_token_id": 5, "ggml.add_bos_token": True})
    assert any("eos_token_id is 5" in note for note in found.notes)
    assert any("add_bos is True, the snapshot's add_bos_token is False" in note for note in found.notes)


def test_an_engine_that_does_not_compose_characters_is_noted_and_not_blamed_on_the_file(tiny, tiny_gguf, tmp_path):
    form = json.loads((tiny / "tokenizer.json").read_text())
    if form["normalizer"] is None:
        pytest.fail("the tiny tokenizer is to normalise, as the released one does")
    found = check_tokenizer(tiny, tiny_gguf)
    assert any("does not compose characters" in note for note in found.notes)
