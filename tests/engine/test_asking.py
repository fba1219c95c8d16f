"""How callers pass sampling parameters, and what they get if requests cannot run or fail."""

import pytest
from fake_device import OVERFLOWS, continuation, fake_engine
from golden_pair import budget

from jaxspec import RequestFailed, UsageError

FITS, TOO_LONG, FAILS = [3, 1, 4], [1] * 40, [OVERFLOWS, 8, 2, 8]
TOKENS = continuation(FITS, 12, True)


def asked(**keywords):
    return {"ignore_eos": True, "max_tokens": 12, **keywords}


# Sampling parameters


def test_keywords_are_parameters_in_every_method():
    engine = fake_engine()
    assert list(engine.generate(FITS, **asked()).token_ids) == TOKENS
    assert [len(o.token_ids) for o in engine.generate([FITS, FITS], **asked())] == [12, 12]
    events = list(engine.stream(FITS, **asked()))
    assert [token for event in events for token in event.token_ids] == TOKENS
    id, told = engine.submit(FITS, **asked()), []
    while not any(event.output for event in told):
        told += engine.step([id])
    assert list(told[-1].output.token_ids) == TOKENS


@pytest.mark.parametrize("name", ["params", "sampling_params"])
def test_keywords_override_the_record_under_either_name(name):
    engine = fake_engine()
    output = engine.generate(FITS, **{name: budget(12)}, max_tokens=5)
    assert list(output.token_ids) == TOKENS[:5]
    several = engine.generate([FITS, FITS], **{name: [budget(3), budget(4)]}, stop_token_ids=[99])
    assert [list(one.token_ids) for one in several] == [TOKENS[:3], TOKENS[:4]]


def test_wrong_parameters_are_one_line(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as users run
    engine = fake_engine()
    with pytest.raises(UsageError, match="'max_new_tokens'; did you mean 'max_tokens'"):
        engine.generate(FITS, max_new_tokens=3)
    with pytest.raises(UsageError, match="'temprature'; did you mean 'temperature'"):
        engine.submit(FITS, temprature=3)
    with pytest.raises(UsageError, match="both params and sampling_params are given"):
        engine.stream(FITS, budget(3), sampling_params=budget(3))
    with pytest.raises(UsageError, match="temperature is -1.0; expected"):
        engine.generate(FITS, temperature=-1.0)
    with pytest.raises(UsageError, match="errors is 'ignore'; expected 'raise' or 'return'"):
        engine.stream(FITS, errors="ignore", **asked())
    assert engine.loop.idle


# Requests that can never run


@pytest.mark.parametrize("name", ["generate", "stream", "submit"])
def test_a_request_that_can_never_run_raises_its_reason(name):
    engine = fake_engine()
    with pytest.raises(UsageError, match="^prompt of 40 and max_tokens 12 make 52 tokens, but the"):
        getattr(engine, name)(TOO_LONG, **asked())
    with pytest.raises(UsageError, match="^the prompt is text but the engine has no tokenizer"):
        getattr(engine, name)("text", **asked())
    with pytest.raises(UsageError, match="^stop needs text but the engine has no tokenizer"):
        getattr(engine, name)(FITS, **asked(stop="x"))
    assert engine.loop.idle


@pytest.mark.parametrize("name", ["generate", "stream"])
def test_one_of_several_that_can_never_run_raises_before_any_runs(name):
    engine = fake_engine()
    with pytest.raises(UsageError, match="^2 of 4 prompts .* none was run; prompt 1: prompt of 40"):
        getattr(engine, name)([FITS, TOO_LONG, FITS, []], **asked())
    with pytest.raises(UsageError, match="^1 of 1 prompts .*errors='return'"):
        getattr(engine, name)([TOO_LONG], **asked())
    assert engine.loop.idle and not engine.loop.device.ran


def test_returned_errors_are_of_single_prompts():
    engine = fake_engine()
    outputs = engine.generate([FITS, TOO_LONG, "text", [], [-1]], errors="return", **asked())
    assert list(outputs[0].token_ids) == TOKENS and outputs[0].error is None
    reasons = ["prompt of 40", "the prompt is text", "the prompt is empty", "the prompt has"]
    for output, reason in zip(outputs[1:], reasons, strict=True):
        assert output.finish_reason == "error" and output.error.startswith(reason)
        assert output.token_ids == ()
    assert outputs[2].prompt == "text" and outputs[1].prompt is None
    assert engine.generate(TOO_LONG, errors="return", **asked()).error == outputs[1].error
    with pytest.raises(UsageError, match="max_tokens is 0"):  # concerns the call, not a prompt
        engine.generate([FITS], errors="return", max_tokens=0)


# Requests that fail while they run


def test_a_request_that_fails_raises_when_all_the_others_have_ended():
    engine = fake_engine()
    with pytest.raises(RequestFailed, match="^1 of 3 requests failed; prompt 1: the logits") as one:
        engine.generate([FITS, FAILS, FITS], **asked())
    outputs = one.value.outputs
    assert [list(outputs[index].token_ids) for index in (0, 2)] == [TOKENS, TOKENS]
    assert list(outputs[1].token_ids) == continuation(FAILS, 12, True)
    assert [output.finish_reason for output in outputs.values()] == ["length", "error", "length"]
    returned = engine.generate([FITS, FAILS, FITS], errors="return", **asked())
    assert [o.token_ids for o in returned] == [o.token_ids for o in outputs.values()]
    with pytest.raises(RequestFailed, match="^the logits for position 12 are not finite"):
        engine.generate(FAILS, **asked())
    assert engine.free_pages == engine.total_pages


def test_a_stream_raises_after_its_last_event():
    engine, told, ended = fake_engine(), [[], []], []
    stream = engine.stream([FAILS, FITS], **asked())
    with pytest.raises(RequestFailed, match="prompt 0: the logits") as failure:
        for event in stream:
            told[event.index] += event.token_ids
            ended += [event.index] if event.output else []
    assert told == [continuation(FAILS, 12, True), TOKENS] and sorted(ended) == [0, 1]
    assert list(failure.value.outputs) == [0]
    assert list(stream) == [], "it has ended"
    returned = engine.stream([FAILS, FITS], errors="return", **asked())
    assert sum(event.output is not None for event in returned) == 2
    left = engine.stream([FAILS, FITS], **asked())
    while next(left).output is None:
        pass
    left.close()
    assert list(left) == [] and engine.loop.idle


def test_an_aborted_request_is_no_failure():
    engine = fake_engine()
    stream = engine.stream([FITS, FITS], **asked(max_tokens=30))
    next(stream)
    engine.loop.abort([1])
    ends = {e.index: e.output.finish_reason for e in stream if e.output is not None}
    assert ends == {0: "abort", 1: "length"}


# Abort


def test_abort_takes_one_id_or_several():
    engine = fake_engine()
    ids = [engine.submit(FITS, **asked()) for _ in range(4)]
    engine.abort(ids[0])
    assert engine.num_waiting == 3
    engine.abort(ids[1:3])
    engine.abort(ids[0])  # has ended already
    assert engine.num_waiting == 1
    told = []
    while not any(event.output for event in told):
        told += engine.step(ids)
    assert {event.index for event in told} == {ids[3]}


def test_many_prompts_are_queued_in_one_turn_or_none_of_them():
    engine, turns = fake_engine(), []
    submit = engine.loop.submit
    engine.loop.submit = lambda *args: turns.append(1) or submit(*args)
    ids = engine.submit_all([FITS] * 5, [budget(n + 1) for n in range(5)])
    assert engine.num_waiting == 5 and turns == [1]
    told = {id: [] for id in ids}
    while not engine.loop.idle:
        for event in engine.step(ids):
            told[event.index] += event.token_ids
    assert list(told.values()) == [TOKENS[: n + 1] for n in range(5)]
    assert engine.submit_all([], budget(3)) == []
    with pytest.raises(UsageError, match="^prompt 1: prompt of 40 and"):
        engine.submit_all([FITS, TOO_LONG], budget(40))
    with pytest.raises(UsageError, match="^prompt of 40 and"):
        engine.submit_all([TOO_LONG], budget(40))
    assert engine.loop.idle
