"""Turns of a conversation with a real engine, and plain decoding measured beside it."""

import pytest

from engine.golden_pair import golden_engine
from jaxspec import SamplingParams
from jaxspec.console.clocks import DecodeClock, ProgramTimer
from jaxspec.console.conversation import Conversation, Document
from jaxspec.console.turns import Talk
from jaxspec.engine.event_stream import StreamEvent
from jaxspec.measure import plain
from jaxspec.text.chat import open_chat_template

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def engine():
    """Its context is short, so that it is soon full."""
    sizes = dict(batch_sizes=(1,), prefill_shapes=((1, 32),))
    return golden_engine(max_batch=1, max_model_len=64, **sizes)


@pytest.fixture
def said() -> list[str]:
    return []


def talk(engine, begin, said, max_tokens=8) -> Talk:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Talk(engine, params, begin, lambda *lines: said.extend(lines), quiet=False)


def test_a_turn_continues_all_turns_before_it(engine, said, capsys):
    talked = talk(engine, Document(), said)
    talked.take("def f")
    first = capsys.readouterr().out.removesuffix("\n")
    talked.take("x")
    second = capsys.readouterr().out.removesuffix("\n")
    assert talked.said == Document(f"def f{first}\nx{second}")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert engine.generate(f"def f{first}\nx", params).text == second
    statistics = [line for line in said if line.startswith("[8 tokens, ")]
    assert len(statistics) == 2 and all("tokens per pass]" in line for line in statistics)


def test_a_full_context_is_one_line_and_a_reset_empties_it(engine, said, capsys):
    talked = talk(engine, Document(), said, max_tokens=1000)
    talked.take("a")
    full = [line for line in said if line.startswith("the context is full")]
    assert full == ["the context is full: 64 of 64 tokens; /reset begins a new conversation"]
    before = talked.said
    talked.take("b " * 40)
    assert said[-1].startswith("the context is full: ") and talked.said == before
    talked.take("/reset")
    talked.take("c")
    assert talked.said.text.startswith("c")


def test_what_a_template_refuses_is_a_line_and_not_said(engine, said, tmp_path, capsys):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    talked = talk(engine, Conversation(open_chat_template(tmp_path)), said)
    talked.take("/system be brief")
    talked.take("hi")
    assert said[-1].startswith("error: the chat template in ") and "no system" in said[-1]
    assert talked.said.messages == () and talked.goes_on
    talked.take("/system")
    assert said[-1] == "system message: be brief"


def test_an_interrupt_before_the_first_token_keeps_the_talk(engine, said, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    talked = talk(engine, Document("x"), said)
    monkeypatch.setattr(talked, "_prepare_for", interrupted)
    talked.take("y")
    assert said == ["(stopped)"] and talked.said == Document("x")


def test_plain_decoding_has_no_drafter_and_no_features(engine):
    alone = plain.plain_engine(engine, longest_prompt=8, tokens=16)
    assert alone.plan.method == "none" and alone.models.proposers == ()
    assert alone.models.target.capture == () and set(alone.params) == {"target"}


def test_plain_decoding_is_measured_for_some_tokens(engine, monkeypatch):
    monkeypatch.setattr(plain, "MOST_TOKENS", 12)
    prompt, steps = [[5, 6, 7]], []
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    clock = plain.plain_decoding(engine, prompt, params, lambda *step: steps.append(step))
    assert clock.tokens == 11 and clock.tokens_per_s == pytest.approx(11 / clock.seconds)
    assert steps == [(done, 11) for done in range(12)]
    monkeypatch.setattr(plain, "MOST_SECONDS", 0.0)
    assert plain.plain_decoding(engine, prompt, params, lambda *_: None).tokens == 8


def test_the_clock_leaves_out_first_tokens_and_what_was_waited_for(monkeypatch):
    times, waited = iter([10.0, 10.0, 12.0, 17.0]), iter([0.0, 0.0, 0.0, 4.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = DecodeClock(lambda: next(waited))
    assert clock.tokens_per_s is None
    for index, tokens in ((0, (1,)), (1, (1,)), (0, (2, 3)), (1, (2, 3, 4, 5))):
        clock.saw(StreamEvent(index, tokens, "", None))
    assert (clock.tokens, clock.seconds, clock.tokens_per_s) == (6, 3.0, 2.0)


def test_programs_that_are_missing_are_timed_once():
    engine = golden_engine(
        max_batch=1, max_model_len=48, batch_sizes=(1,), prefill_shapes=((1, 16),)
    )
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    def run() -> None:
        """A submitted request; `generate` would make its first programs before it runs."""
        id = engine.submit([1, 2, 3], params)
        while not any(event.output for event in engine.step([id])):
            pass

    timer = ProgramTimer(engine)
    run()
    made, seconds = timer.programs, timer.seconds
    run()
    assert made == timer.programs == 3 and seconds == timer.seconds > 0
    again = ProgramTimer(engine)
    run()
    assert again.programs == 0 and again.seconds == 0.0
