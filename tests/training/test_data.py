"""Text files become sequences, and a run sees them in a fixed order."""

from pathlib import Path

import numpy as np
import pytest

from jaxspec.errors import LoadError, UsageError
from jaxspec.text.tokenizer import open_tokenizer
from jaxspec.training import documents as reading
from jaxspec.training.data import Sequences, sequences_of_documents
from jaxspec.training.documents import Document, read_documents, summary
from jaxspec.training.new_drafter import spread_layer_ids
from jaxspec.training.pretraining.bpe import END, MASK, save_tokenizer, train_tokenizer
from jaxspec.training.pretraining.corpus import (
    Selection,
    collect,
    divide,
    sequences_of_corpus,
    set_aside,
    windows_of_corpus,
)
from jaxspec.training.pretraining.pretrain import TargetShape, pretrain
from jaxspec.training.recipe import Cadence, Optimization
from jaxspec.training.saved_config import differences


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_every_epoch_sees_every_sequence_once_in_its_own_order():
    sequences = Sequences(np.arange(10)[:, None], np.arange(10))
    epochs = [
        np.concatenate([sequences.batch_of_step(s, 5, 0).first for s in (2 * e, 2 * e + 1)])
        for e in range(2)
    ]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    np.testing.assert_array_equal(sequences.batch_of_step(1, 5, 0).first, epochs[0][5:])
    straddling = sequences.batch_of_step(1, 7, 0).first
    assert list(straddling) == [*epochs[0][7:], *epochs[1][:4]]


def test_documents_become_sequences(tmp_path):
    documents = [Document(tmp_path / "a", "abcd", True), Document(tmp_path / "b", "efgh", True)]
    sequences, left_out = sequences_of_documents(
        documents, characters, 0, length=5, block_size=2, num_ids=128
    )
    assert left_out == []
    assert sequences.tokens.tolist() == [[97, 98, 99, 100, 0], [101, 102, 103, 104, 0]]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no file or folder .*lost.txt"),
        (b"", "lost.txt is empty"),
        (b" \n", "lost.txt is empty"),
        (b"caf\xe9", r"lost.txt is not UTF-8 \(byte 3 is 0xe9\)"),
        (b"ab", r"lost.txt has 2 tokens, expected more than a block \(2\)"),
        (b"abc", "3 tokens, expected at least one sequence of 5"),
    ],
    ids=["missing", "empty", "blank", "latin-1", "short", "too little"],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "lost.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LoadError, match=message) as caught:
        documents, _ = read_documents([path])
        sequences_of_documents(documents, characters, None, length=5, block_size=2, num_ids=128)
    assert "\n" not in str(caught.value)


def test_a_character_between_two_pieces_of_a_file_is_one_character(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 3)
    path, text = tmp_path / "text", "aß你好\r\nx" * 5
    path.write_bytes(text.encode())
    assert reading.text_of_file(path) == text
    for content, found in [
        (text.encode() + b"\xff", "byte 60 is 0xff"),
        (text.encode()[:-4], "byte 54 is 0xe5"),
    ]:
        path.write_bytes(content)
        with pytest.raises(reading.Unfit, match=found):
            reading.text_of_file(path)


@pytest.fixture
def mixed(tmp_path):
    """A folder of which only one file is long enough text."""
    (tmp_path / "deeper").mkdir()
    for name, content in [
        ("text.txt", b"abcdef"),
        ("deeper/model.safetensors", bytes(range(256))),
        ("deeper/picture.png", b"\x89PNG"),
        ("deeper/__init__.py", b""),
        ("short.txt", b"ab"),
    ]:
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sequences_of(documents, length=3):
    return sequences_of_documents(documents, characters, None, length, block_size=2, num_ids=128)


def test_files_of_a_folder_that_are_no_text_are_left_out_and_counted(mixed):
    documents, no_text = read_documents([mixed])
    sequences, short = sequences_of(documents)
    assert sequences.tokens.tolist() == [[97, 98, 99], [100, 101, 102]]
    assert summary(no_text + short) == (
        f"1 empty ({mixed}/deeper/__init__.py), "
        f"2 not UTF-8 ({mixed}/deeper/model.safetensors), "
        f"1 no longer than a block ({mixed}/short.txt)"
    )


@pytest.mark.parametrize("name", ["deeper/picture.png", "deeper/__init__.py", "short.txt"])
def test_a_file_that_was_named_itself_is_refused(mixed, name):
    with pytest.raises(LoadError, match=f"{name} (is|has) .*leave it out"):
        sequences_of(read_documents([mixed / "text.txt", mixed / name])[0])


def test_a_folder_without_any_text_is_refused(mixed):
    with pytest.raises(LoadError, match=r"no text .* 1 empty \(.*2 not UTF-8 .*expected UTF-8"):
        read_documents([mixed / "deeper"])


@pytest.mark.parametrize(
    "text, end, found",
    [("abcz", None, "b.txt has the token id 122"), ("abcd", 120, "end of a text has the token id")],
)
def test_ids_outside_the_embedding_are_refused(text, end, found):
    documents = [Document(Path("a.txt"), "aaaa", False), Document(Path("b.txt"), text, False)]
    with pytest.raises(LoadError, match=rf"{found}.* has 110 rows \(ids 0 to 109\)"):
        sequences_of_documents(documents, characters, end, 4, block_size=2, num_ids=110)


def test_pretraining_refuses_ids_outside_the_embedding(tmp_path):
    tokenizer = train_tokenizer(["some text"], 100)
    count = tokenizer.get_vocab_size()
    assert count > 100

    def begin(vocab_size, ids):
        sequences = Sequences(np.array([ids], np.int32), np.zeros(1, np.int32))
        shape = TargetShape(vocab_size)
        pretrain(shape, tokenizer, sequences, Optimization(), Cadence(), tmp_path, tmp_path)

    with pytest.raises(UsageError, match=f"{count} tokens, .* 100 rows; .* at least {count}"):
        begin(100, [0, 1])
    with pytest.raises(LoadError, match=f"the text has the token id {count}, .* {count} rows"):
        begin(count, [0, count])


def test_corpus_leaves_out_what_repeats_held_out_files(tmp_path):
    other = [f"this_is_a_line_of_another_file = {i}" for i in range(9)]
    lines = [f"def a_function_with_a_distinctive_name_{i}(argument):" for i in range(20)]
    for folder, name, text in [
        ("new", "kept.py", "\n".join(lines[10:])),
        ("new", "held.py", "\n".join(lines[:10])),
        ("new", "some_of_held.py", "\n".join([*lines[6:10], *other])),
        ("old", "kept.py", "\n".join(lines[10:])),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    documents = collect([tmp_path / "new", tmp_path / "old"], Selection())
    assert [path.as_posix() for path, _ in documents] == [
        "held.py",
        "kept.py",
        "some_of_held.py",
    ]
    kept, unseen = divide(documents, {"held.py"})
    assert [[p.name for p, _ in part] for part in (kept, unseen)] == [["kept.py"], ["held.py"]]


def test_folders_can_be_left_out(tmp_path):
    for folder in ("library", "library/tests/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text(f"# of {folder}\n" * 20)
    every = collect([tmp_path], Selection())
    assert [path.as_posix() for path, _ in every] == [
        "library/file.py",
        "library/tests/deeper/file.py",
    ]
    assert collect([tmp_path], Selection(without=("tests",))) == every[:1]


def test_tokenizer_round_trip(tmp_path):
    text = Path(__file__).read_text()
    made = train_tokenizer([text], 400)
    save_tokenizer(made, tmp_path, 2048)
    read = open_tokenizer(tmp_path)
    assert read.vocabulary_size == 400
    assert read.special_tokens["eos_token"] == made.token_to_id(END)
    assert read.special_tokens["mask_token"] == made.token_to_id(MASK)
    for sample in (text, "\tx = 'Grüße 你好'\r\n\n    pass  # 12345"):
        ids = read.encode(sample, add_special_tokens=False)
        assert read.decode(ids) == sample and len(ids) < len(sample.encode())
    sequences = sequences_of_corpus([(Path("x"), text)], made, 0, 16, seed=0)
    assert read.decode(sequences.tokens.ravel().tolist()) in text


def test_windows_are_pieces_of_the_text_from_many_places():
    text = Path(__file__).read_text()
    made = train_tokenizer([text], 400)
    stream = sequences_of_corpus([(Path("x"), text)], made, 0, 1, seed=0).tokens.ravel().tolist()
    sequences = windows_of_corpus([(Path("x"), text)], made, 0, 16, 200, seed=0)
    starts = {starts_of(stream, window) for window in sequences.tokens.tolist()}
    assert sequences.tokens.shape == (200, 16) and len(starts) > 100


def starts_of(stream, window):
    return next(i for i in range(len(stream)) if stream[i : i + len(window)] == window)


def test_what_is_set_aside_is_nowhere_else():
    documents = [(Path(str(i)), "") for i in range(20)]
    kept, aside = set_aside(documents, 0.15, seed=0)
    assert len(aside) == 3 and sorted(kept + aside) == sorted(documents)
    assert set_aside(documents, 0.15, seed=0) == (kept, aside) != set_aside(documents, 0.15, seed=1)


def test_published_layers():
    assert spread_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layer_ids(28, 5) == (1, 7, 13, 19, 25)
    assert spread_layer_ids(24, 1) == (12,)
    with pytest.raises(UsageError, match="has 7 layers, expected at least 8 for 5 features"):
        spread_layer_ids(7, 5)


def test_differences():
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == [
        "a: 1 -> absent",
        "b: 2 -> 3",
        "c: absent -> 4",
    ]
