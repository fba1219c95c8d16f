"""Adding a step's tokens in one pass is the same as adding them one after the other."""

import codecs
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.requests.advance import emit, end
from jaxspec.engine.requests.request import NOT_FINITE, Gained, History, NewTokens, Request
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.text.stream import TextStream, stop_scan
from jaxspec.text.tokenizer import Tokenizer

TEXTS = ["a", "b", "ab", "bab", "", "\n", "\u00e9", "<end>", "a\u20acb"]
PIECES = [text.encode() for text in TEXTS]
PIECES += [bytes([byte]) for byte in "\u00e9\u20ac\U0001f600".encode()] + [b"\xff", b"a\xf0"]
SPECIAL = TEXTS.index("<end>")


class Table(Tokenizer):
    """A tokenizer whose tokens may end in the middle of a character."""

    def __init__(self):
        object.__setattr__(self, "special_ids", frozenset([SPECIAL]))

    def token_bytes(self, id: int) -> bytes:
        return PIECES[id]


@dataclasses.dataclass
class Expected:
    """What a request has, in the simplest way: the whole text is searched after every token."""

    request: Request
    bytes_told: bytes = b""
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None

    def text(self, whole: bool) -> str:
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.bytes_told, whole)

    def stop_in(self, text: str) -> tuple[int, int, str] | None:
        """The stop string that is completed first: its end, its start, and itself."""
        found = [(text.find(one), one) for one in self.request.params.stop if one in text]
        return min(((at + len(one), at, one) for at, one in found), default=None)

    def add(self, token: int) -> None:
        request = self.request
        if token == NOT_FINITE:
            self.reason = "error"
            return
        self.tokens.append(token)
        if token in request.stop_ids:
            self.reason, self.stop = "stop", None if token in request.end_ids else token
            return
        self.bytes_told += b"" if token == SPECIAL else PIECES[token]
        if found := self.stop_in(self.text(whole=False)):
            self.reason, self.stop = "stop", found[2]
        elif len(self.tokens) == request.params.max_tokens:
            self.reason = "length"

    def released(self) -> str:
        """The text that the caller has: without what may still become a stop string."""
        text = self.text(whole=self.reason is not None and not isinstance(self.stop, str))
        if found := self.stop_in(text):
            return text[: found[1]]
        if self.reason is not None:
            return text
        ends = (n for n in range(len(text) + 1) if self._may_become_stop(text[len(text) - n :]))
        return text[: len(text) - max(ends)]

    def _may_become_stop(self, end: str) -> bool:
        stops = self.request.params.stop
        return not end or any(stop.startswith(end) and stop != end for stop in stops)


TOKEN = st.integers(0, len(PIECES) - 1)
STEP = st.lists(st.one_of(TOKEN, TOKEN, TOKEN, st.just(NOT_FINITE)), min_size=1, max_size=6)
STOPS = st.lists(st.text("ab\n\u00e9\u20ac\ufffd", min_size=1, max_size=4), max_size=3)


def request_with(stops, own, ids, max_tokens) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop=stops, stop_token_ids=ids, logprobs=0)
    ends = frozenset(own)
    return Request(
        1, (7,), params, ends | set(ids), 0, TextStream(), stop_scan(stops), 0.0, end_ids=ends
    )


def new_tokens(tokens: list[int], now: float) -> NewTokens:
    return NewTokens(tokens, len(tokens) - 1, [{token: now} for token in tokens], now)


@settings(max_examples=600, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=8),
    stops=STOPS,
    own=st.lists(TOKEN, max_size=1),
    ids=st.lists(TOKEN, max_size=1),
    max_tokens=st.integers(1, 20),
)
def test_one_pass_over_a_step_is_one_token_after_the_other(steps, stops, own, ids, max_tokens):
    request = request_with(stops, own, ids, max_tokens)
    expected, before, text = Expected(request), [request], ""
    for now, tokens in enumerate(steps):
        count = len(expected.tokens)
        for token in tokens:
            if expected.reason is None:
                expected.add(token)
        request, increment = emit(request, new_tokens(tokens, now), Table())
        before.append(request)
        text += increment.gained.text
        assert list(increment.token_ids) == expected.tokens[count:]
        assert text == request.text == expected.released()
        assert [list(one) for one in increment.gained.logprobs] == [
            [token] for token in increment.token_ids
        ]
        assert (request.finish_reason, request.stop_reason) == (expected.reason, expected.stop)
        assert (increment.ended is request) == (expected.reason is not None)
        if expected.reason is not None:
            break
    assert list(request.token_ids) == expected.tokens and request.num_tokens == len(expected.tokens)
    if expected.reason == "error":
        assert request.error.startswith(f"the logits for position {1 + len(expected.tokens)} are")
    for count, one in enumerate(before):
        assert len(one.history) == count, "a request of before has changed"
        assert one.token_ids == request.token_ids[: one.num_tokens]


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(TOKEN, max_size=6), stops=STOPS)
def test_an_end_from_outside_gives_the_text_that_was_held_back(tokens, stops):
    request = request_with(stops, [], [], 20)
    expected = Expected(request)
    for token in tokens:
        if expected.reason is None:
            expected.add(token)
            request, _ = emit(request, new_tokens([token], 0.0), Table())
    if expected.reason is None:
        expected.reason = "abort"
        request, increment = end(request, "abort")
        assert increment.token_ids == () and increment.ended is request
    assert request.text == expected.released() and request.finish_reason == expected.reason


def test_histories_that_part_do_not_see_each_other():
    """As after an exception between adding a step and keeping the request."""
    steps = [Gained((n,)) for n in range(6)]
    common = History().with_step(steps[0])
    one = common.with_step(steps[1]).with_step(steps[2])
    other = common.with_step(steps[3])
    further = one.with_step(steps[4])
    assert [*common] == steps[:1] and [*one] == steps[:3] and [*other] == [steps[0], steps[3]]
    assert [*further] == [*steps[:3], steps[4]] and len(further) == 4
    assert not [*History()]
