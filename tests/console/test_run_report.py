"""The last lines of a run, in words that a newcomer understands."""

import dataclasses

import pytest

from jaxspec.console.report import RunTimes, passes, summary
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.stats.acceptance import RequestStats, counts_of

TIMES = RunTimes(seconds=2.0, start_s=3.25)


def output(tokens=12, steps=3, drafts=4) -> RequestOutput:
    lengths = [4] * steps if drafts else []
    stats = RequestStats(
        **counts_of(lengths, [drafts] * len(lengths), 4),
        prompt_tokens=5,
        generation_tokens=tokens,
        itl_s=(0.1,) * steps,
    )
    return RequestOutput((1,) * 5, (2,) * tokens, "x", "length", None, None, stats)


def test_tokens_passes_and_time():
    lines = summary([output()], TIMES)
    assert lines[0] == "12 tokens in 2.00 s, 6 tokens/s"
    assert lines[1] == "4 passes of the target model, 3.00 tokens per pass (plain decoding: 1.00)"
    assert lines[-1] == "not counted: 3.2 s to start"
    assert "9 of 12 drafts accepted; mean acceptance length 4.00" in lines[2]
    assert lines[2].endswith("place 1 to 4: 1.00, 1.00, 1.00, 0.00")


def test_several_prompts_are_counted_together():
    lines = summary([output(), output(tokens=20, steps=4)], TIMES)
    assert lines[0] == "32 tokens for 2 prompts in 2.00 s, 16 tokens/s"
    assert lines[1].startswith("9 passes of the target model, 3.56 tokens per pass")


def test_plain_decoding_is_a_pass_per_token():
    one = output(tokens=4, steps=3, drafts=0)
    assert summary([one], TIMES) == [
        "4 tokens in 2.00 s, 2 tokens/s",
        "4 passes of the target model, 1.00 tokens per pass",
        "not counted: 3.2 s to start",
    ]
    nothing = dataclasses.replace(one, token_ids=())
    assert passes(nothing) == 0


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (90.0, "3.00 times as fast as plain decoding (90 against 30 tokens/s, measured with 31"),
        (15.0, "slower than plain decoding: 0.50 times its speed (15 against 30 tokens/s, measu"),
    ],
)
def test_the_speed_up_is_of_measured_rates(own, line):
    times = dataclasses.replace(TIMES, tokens_per_s=own, plain_tokens_per_s=30.0, plain_tokens=31)
    lines = summary([output()], times)
    assert lines[0] == "12 tokens in 2.00 s" and lines[2].startswith(line)


@pytest.mark.parametrize("missing", ["tokens_per_s", "plain_tokens_per_s"])
def test_without_a_measurement_there_is_no_speed_up(missing):
    times = dataclasses.replace(TIMES, tokens_per_s=9.0, plain_tokens_per_s=3.0)
    lines = summary([output()], dataclasses.replace(times, **{missing: None}))
    assert not any("plain decoding (" in line or "slower" in line for line in lines)


def test_programs_that_were_made_on_the_way_are_not_hidden():
    times = dataclasses.replace(TIMES, late_programs=2, late_s=1.5)
    assert summary([output()], times)[-1] == (
        "not counted: 3.2 s to start, and 1.5 s for 2 programs in between"
    )
