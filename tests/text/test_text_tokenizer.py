"""Qwen's real vocabulary through the tokenizer, against tiktoken and transformers."""

import json
import unicodedata

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from qwen_vocabulary import MARKERS, SPECIAL, qwen_tiktoken
from text_samples import EVERYTHING, SAMPLES

from jaxspec.text.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def oracle():
    return qwen_tiktoken()


@pytest.mark.parametrize("name", SAMPLES)
def test_ids_equal_tiktoken_and_round_trip(qwen, oracle, name):
    text = unicodedata.normalize("NFC", SAMPLES[name])
    ids = qwen.encode(SAMPLES[name], add_special_tokens=False)
    assert ids == oracle.encode_ordinary(text)
    assert qwen.decode(ids) == text


@given(text=st.text(alphabet=st.sampled_from(EVERYTHING), max_size=80))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shuffled_text_equals_tiktoken(qwen, oracle, text):
    """Hypothesis also tries strings from the code; those that name a special token are one id."""
    text = unicodedata.normalize("NFC", text)
    assume(not any(token in text for token in SPECIAL + MARKERS))
    ids = qwen.encode(text, add_special_tokens=False)
    assert ids == oracle.encode_ordinary(text)
    assert qwen.decode(ids) == text


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_ids_equal_transformers(qwen, reference, add_special_tokens):
    text = f"<|im_start|>user\n{EVERYTHING}<|im_end|>\n<think>\n\n</think>"
    expected = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert qwen.encode(text, add_special_tokens=add_special_tokens) == expected
    assert qwen.decode(expected) == reference.decode(expected, skip_special_tokens=True)


def test_ids_are_the_published_ones(qwen):
    text = "<|im_start|>user\nHello, world!<|im_end|>"
    ids = [151644, 872, 198, 9707, 11, 1879, 0, 151645]
    assert qwen.encode(text, add_special_tokens=False) == ids


def test_special_tokens_are_single_ids_and_only_the_special_ones_are_skipped(qwen):
    ids = qwen.encode("".join(SPECIAL + MARKERS), add_special_tokens=False)
    assert ids == list(range(151643, 151669))
    assert qwen.special_ids == frozenset(range(151643, 151657))
    assert qwen.decode(ids) == "".join(MARKERS)
    assert qwen.decode(ids, skip_special_tokens=False) == "".join(SPECIAL + MARKERS)
    assert qwen.special_tokens == {"eos_token": 151645, "pad_token": 151643}
    assert qwen.vocabulary_size == 151669


def test_every_token_has_the_bytes_that_tiktoken_gives_it(qwen, oracle):
    assert all(qwen.token_bytes(id) == oracle.decode_single_token_bytes(id) for id in range(151643))


def test_ids_in_the_padding_of_the_embedding_are_silent(qwen):
    assert qwen.token_bytes(151900) == b""
    assert qwen.decode([9707, 151900]) == qwen.decode([9707])


def small_tokenizer(folder, vocabulary=("a", "b"), post_processor=None, **changes):
    """A two-letter tokenizer folder, with changes to its tokenizer.json."""
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel"} | byte_level,
        "post_processor": post_processor,
        "decoder": {"type": "ByteLevel"} | byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(vocabulary)}, "merges": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return folder


def added(id, content, special=True):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": special} | flags


def test_special_tokens_come_only_from_the_post_processor(tmp_path):
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
    }
    folder = small_tokenizer(tmp_path, post_processor=template, added_tokens=[added(2, "<s>")])
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
    assert tokenizer.encode("ab", add_special_tokens=True) == [2, 0, 1]


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    folder = small_tokenizer(tmp_path, truncation=truncation, padding=padding)
    assert open_tokenizer(folder).encode("abab", add_special_tokens=True) == [0, 1, 0, 1]


def test_added_tokens_decode_as_the_library_does(tmp_path):
    tokens = ["é", "x y", "<p>", "日本"]
    entries = [added(2 + i, token, special=False) for i, token in enumerate(tokens)]
    tokenizer = open_tokenizer(small_tokenizer(tmp_path, added_tokens=entries))
    for id in range(2 + len(tokens)):
        assert tokenizer.token_bytes(id).decode("utf-8", "replace") == tokenizer.decode([id])


def test_vocabularies_are_told_apart_by_content(tmp_path, qwen, qwen_folder):
    found = {
        name: open_tokenizer(small_tokenizer(tmp_path / name, **changes)).vocabulary
        for name, changes in {
            "plain": {},
            "same": {"normalizer": {"type": "NFC"}},
            "swapped": {"vocabulary": ("b", "a")},
            "longer": {"added_tokens": [added(2, "<s>")]},
        }.items()
    }
    assert found["plain"] == found["same"] == {0: "a", 1: "b"}
    assert found["swapped"] == {0: "b", 1: "a"}
    assert found["longer"] == {0: "a", 1: "b", 2: "<s>"}
    assert qwen.vocabulary == open_tokenizer(qwen_folder).vocabulary
