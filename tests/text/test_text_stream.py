"""A streamed text comes in pieces of whole characters, which joined are the decoded text."""

import random
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_samples import EVERYTHING, SAMPLES

from jaxspec.errors import UsageError
from jaxspec.text.stream import (
    TextStream,
    feed_text,
    feed_tokens,
    finish_text,
    finish_tokens,
    stop_scan,
)

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream_pieces(tokenizer, chunks, **options):
    stream, pieces = TextStream(), []
    for chunk in chunks:
        stream, piece = feed_tokens(stream, tokenizer, chunk, **options)
        pieces.append(piece)
    return [*pieces, finish_tokens(stream)]


def cut(items, sizes):
    """Splits a sequence into runs of the given sizes, repeated as needed."""
    runs, place = [], 0
    while place < len(items):
        size = sizes[len(runs) % len(sizes)]
        runs.append(items[place : place + size])
        place += size
    return runs


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_pieces_join_to_the_whole_and_hold_no_half_character(qwen, name, size):
    text = unicodedata.normalize("NFC", SAMPLES[name])
    ids = qwen.encode(text, add_special_tokens=False)
    pieces = stream_pieces(qwen, cut(ids, [size]))
    assert "".join(pieces) == qwen.decode(ids) == text
    assert sum(piece.count("�") for piece in pieces) == text.count("�")


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "𠮷", "🏳️‍🌈", "நி", "ạ̈"])
def test_one_byte_a_token_gives_one_character_a_piece(qwen, text):
    byte_ids = {qwen.token_bytes(id): id for id in range(256)}
    ids = [byte_ids[bytes([byte])] for byte in text.encode()]
    pieces = stream_pieces(qwen, [[id] for id in ids])
    assert [piece for piece in pieces if piece] == list(text)
    assert len(pieces) == len(text.encode()) + 1


@pytest.mark.parametrize(
    ("data", "last"),
    [
        (b"ok\xf0\x9f\x99", "�"),
        (b"ok\xe4\xbd", "�"),
        (b"ok\xc3", "�"),
        (b"ok\xff", ""),
        (b"ok", ""),
    ],
)
def test_a_cut_off_character_comes_out_at_the_end_only(qwen, data, last):
    byte_ids = {qwen.token_bytes(id): id for id in range(256)}
    ids = [byte_ids[bytes([byte])] for byte in data]
    pieces = stream_pieces(qwen, [[id] for id in ids])
    assert "".join(pieces) == qwen.decode(ids) == data.decode("utf-8", "replace")
    assert pieces[-1] == last


@given(
    ids=st.lists(st.integers(0, 151935) | st.integers(0, 255), max_size=40),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    skip=st.booleans(),
)
@relaxed
def test_any_tokens_in_any_portions_join_to_the_whole(qwen, ids, sizes, skip):
    pieces = stream_pieces(qwen, cut(ids, sizes), skip_special_tokens=skip)
    assert "".join(pieces) == qwen.decode(ids, skip_special_tokens=skip)


def test_long_random_stream_joins_to_the_whole(qwen):
    ids = random.Random(0).choices(range(151936), k=20_000)
    assert "".join(stream_pieces(qwen, cut(ids, [7, 1, 3]))) == qwen.decode(ids)


def test_special_tokens_do_not_break_a_character(qwen):
    byte_ids = {qwen.token_bytes(id): id for id in range(256)}
    first, *rest = (byte_ids[bytes([byte])] for byte in "🙂".encode())
    pieces = stream_pieces(qwen, [[id] for id in [first, 151645, *rest]])
    assert pieces == ["", "", "", "", "🙂", ""]


def scan_pieces(stops, pieces):
    scan, released = stop_scan(stops), []
    for piece in pieces:
        scan, text = feed_text(scan, piece)
        released.append(text)
    return scan, [*released, finish_text(scan)]


def first_complete_stop(text, stops):
    """Reads one more letter at a time until the text ends with a stop string."""
    for end in range(len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text(alphabet="ab<", max_size=30)
few_stops = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4)


@given(text=letters, stops=few_stops, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
@relaxed
def test_stop_scan_equals_a_letter_by_letter_search(text, stops, sizes):
    scan, released = scan_pieces(stops, cut(text, sizes))
    assert ("".join(released), scan.found) == first_complete_stop(text, stops)


@given(text=letters, stops=few_stops)
@relaxed
def test_stop_scan_holds_back_no_more_than_it_must(text, stops):
    scan, _ = feed_text(stop_scan(stops), text)
    assert scan.held == "" or any(stop.startswith(scan.held) for stop in stops)


def test_text_that_only_began_like_a_stop_string_comes_out():
    scan, released = scan_pieces(["</answer>"], ["42 <", "/ans", "wers> ", "</answer"])
    assert released == ["42 ", "", "</answers> ", "", "</answer"]
    assert scan.found is None


def test_nothing_comes_out_after_the_stop_string():
    scan, released = scan_pieces(["\n\n", "END"], ["one\n", "\ntwo END", "three"])
    assert released == ["one", "", "", ""]
    assert scan.found == "\n\n"


def test_stop_strings_work_on_streamed_tokens(qwen):
    ids = qwen.encode(EVERYTHING, add_special_tokens=False)
    stop = "🇯🇵"
    _, released = scan_pieces([stop], stream_pieces(qwen, cut(ids, [3])))
    assert "".join(released) == EVERYTHING[: EVERYTHING.index(stop)]


@pytest.mark.parametrize("stops", [[""], ["ok", ""], "text"])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(UsageError, match="expected a list of non-empty strings"):
        stop_scan(stops)
