"""Which prompts a decode step reads a chunk of, and which are read by programs of their own."""

import dataclasses
import logging

import pytest
from fake_device import continuation, fake_engine
from golden_pair import ALL_SIZES, HOUSE, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from unpacked import chunk_of

from jaxspec.engine.plan.beside import why_not
from jaxspec.engine.plan.kernels import kernel_uses
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.beside import MOST_STEPS, choose_beside, tokens_to_read
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.observer import StepObserver
from jaxspec.errors import UsageError
from jaxspec.models.qwen3 import Qwen3

CHUNK = 4


def greedy(max_tokens, **params):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)


def engine_with(**options):
    sizes = {"num_slots": 5, "num_pages": 120, "max_model_len": 96, "beside": CHUNK}
    return fake_engine(**sizes | options)


def decoding(engine, budget=80):
    """A request that has more than its first token."""
    early = engine.submit([9, 8, 7], greedy(budget))
    while engine.loop.ledger.running == {} or engine.loop.ledger.running[early].num_tokens < 2:
        engine.step([early])
    return early


class Programs(StepObserver):
    """The names of the programs that read tokens, and how many tokens of prompts each reads."""

    def __init__(self, engine):
        self.ran = []
        engine.loop.device.observers.append(self)

    def program(self, step, inputs, static):
        if step.__name__ == "prefill_step":
            self.ran.append(("prefill", int(sum(chunk_of(inputs[0]).counts))))
        elif step.__name__ == "mixed_step":
            self.ran.append(("mixed", int(chunk_of(inputs[2]).counts[0])))
        elif step.__name__ == "decode_step":
            self.ran.append(("decode", 0))


def outputs_of(engine, ids):
    outputs = {}
    while len(outputs) < len(ids):
        for event in engine.step(ids):
            if event.output is not None:
                outputs[event.index] = event.output
    return outputs


def ran_for(prompts, steps=8, **options):
    """What runs once these prompts have come while a request decodes."""
    engine = engine_with(**options)
    early, programs = decoding(engine), Programs(engine)
    for number, prompt in enumerate(prompts):
        engine.submit([1 + number] * prompt, greedy(4))
    for _ in range(steps):
        engine.step([early])
    return programs.ran


def test_a_prompt_is_read_in_chunks_beside_the_one_that_decodes():
    assert ran_for([10], steps=5)[:4] == [("mixed", 4), ("mixed", 4), ("mixed", 2), ("decode", 0)]


def test_two_prompts_take_turns_as_those_of_other_programs_do():
    ran = ran_for([11, 3])
    assert [tokens for name, tokens in ran if name == "mixed"] == [4, 3, 4, 3]


def test_a_long_prompt_is_read_by_programs_of_its_own_to_its_end():
    long = MOST_STEPS * CHUNK + 1
    names = {name for name, _ in ran_for([long], steps=2 * long // 5 + 4)}
    assert names == {"prefill", "decode"}
    assert {name for name, _ in ran_for([long - 1], steps=MOST_STEPS)} == {"mixed"}


def test_a_short_prompt_that_comes_beside_a_long_one_is_read_with_it():
    assert "mixed" not in {name for name, _ in ran_for([MOST_STEPS * CHUNK + 1, 2], steps=6)}


def test_while_no_slot_is_free_prompts_are_read_by_programs_of_their_own():
    assert {name for name, _ in ran_for([9], num_slots=2, steps=2)} == {"prefill", "decode"}
    assert ran_for([9], num_slots=3, steps=1) == [("mixed", 4)]


def test_while_somebody_waits_for_pages_prompts_are_read_by_programs_of_their_own():
    engine = engine_with(num_pages=40)
    early = decoding(engine)
    engine.submit([3] * 60, greedy(30))  # finds no room
    engine.submit([4] * 6, greedy(4))
    programs = Programs(engine)
    engine.step([early])
    assert engine.loop.ledger.waiting and [name for name, _ in programs.ran] == ["prefill"]


def test_nobody_is_read_beside_those_that_have_their_first_token_only():
    engine, programs = engine_with(), None
    programs = Programs(engine)
    outputs_of(engine, [engine.submit([1 + i] * 7, greedy(5)) for i in range(4)])
    assert {name for name, _ in programs.ran} == {"prefill", "decode"}


def test_who_wants_log_probabilities_of_the_prompt_is_read_by_programs_of_its_own():
    engine = engine_with()
    early, programs = decoding(engine), Programs(engine)
    scored = engine.submit([2] * 6, greedy(3, prompt_logprobs=0))
    [output] = outputs_of(engine, [scored]).values()
    assert len(output.prompt_logprobs) == 6 and "mixed" not in dict(programs.ran)
    engine.abort([early])


def test_a_program_that_is_not_ready_is_not_waited_for():
    engine = engine_with()
    early, programs = decoding(engine), Programs(engine)
    engine.loop.device.has = lambda *_, **__: False
    late = engine.submit([1] * 9, greedy(4))
    outputs_of(engine, [late])
    assert {name for name, _ in programs.ran} == {"prefill", "decode"}
    engine.abort([early])


def test_the_steps_of_others_end_with_their_budgets_while_a_prompt_is_read():
    engine = engine_with()
    early, late = decoding(engine, budget=9), engine.submit([1] * 40, greedy(6))
    outputs = outputs_of(engine, [early, late])
    assert [*outputs] == [early, late]
    assert list(outputs[early].token_ids) == continuation([9, 8, 7], 9, True)
    assert list(outputs[late].token_ids) == continuation([1] * 40, 6, True)


def test_an_abort_in_the_middle_of_a_prompt_frees_its_pages():
    engine = engine_with()
    early, late = decoding(engine), engine.submit([1] * 30, greedy(6))
    for _ in range(3):
        engine.step([early])
    assert 0 < engine.loop.ledger.running[late].prefilled < 30
    engine.abort([late])
    [output] = outputs_of(engine, [early]).values()
    assert list(output.token_ids) == continuation([9, 8, 7], 80, True)
    assert engine.free_pages == engine.total_pages


def test_what_was_read_beside_is_found_by_the_next_prompt():
    engine = engine_with()
    early = decoding(engine)
    first = engine.submit([1] * 30, greedy(6))
    engine.step([early])
    engine.step([early])
    again = engine.submit([1] * 22, greedy(6))
    outputs = outputs_of(engine, [first, again])
    assert outputs[again].stats.cached_tokens >= 8
    assert list(outputs[again].token_ids) == continuation([1] * 22, 6, True)
    engine.abort([early])


@settings(max_examples=25)
@given(
    st.sampled_from(["none", "dflash", "ngram"]),
    st.sampled_from([3, 5, 9]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9)), max_size=7),
)
def test_whoever_comes_while_others_decode_gets_its_tokens(method, num_slots, requests):
    chunk = CHUNK if method != "none" else 3
    engine = engine_with(method=method, num_slots=num_slots, beside=chunk)
    ids, asked = [], {}
    for number, (prompt, budget, steps) in enumerate(requests):
        text = [1 + number % 3] * (prompt // 2) + [5 + number] * (prompt - prompt // 2)
        ids.append(engine.submit(text, greedy(budget)))
        asked[ids[-1]] = text, budget
        for _ in range(steps):
            engine.loop.step() if not engine.loop.idle else None
    outputs = outputs_of(engine, ids)
    for id, (text, budget) in asked.items():
        assert list(outputs[id].token_ids) == continuation(text, budget, True)
    assert engine.free_pages == engine.total_pages


def test_the_choice_is_a_pure_one():
    engine = engine_with()
    early = decoding(engine)
    engine.submit([1] * 10, greedy(4))
    engine.step([early])
    plan, ledger = engine.plan, engine.loop.ledger
    running = [*ledger.running.values()]
    ready, unread = running[:1], running[1]
    assert choose_beside(plan, ledger, running, ready) is unread
    assert choose_beside(plan, ledger, running, []) is None
    assert choose_beside(dataclasses.replace(plan, beside=0), ledger, running, ready) is None
    assert choose_beside(plan, ledger, ready, ready) is None
    assert tokens_to_read(unread) == 10
    assert tokens_to_read(dataclasses.replace(unread, begins_at=8)) == 2


# The option


CANNOT = {
    "exact reads all prompts": dict(exact=True, **ALL_SIZES),
    "the host reads every result": dict(driver="lockstep"),
    "the host reads every": dict(method="dflash+ngram"),
    "so a slot never stays free": dict(max_batch=2, batch_sizes=(2,), prefill_shapes=((2, 32),)),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_the_log_says_where_the_option_has_no_effect(reason, caplog):
    models, house = opened().models, {"driver": "overlapped", **HOUSE}
    options = EngineOptions(**house | CANNOT[reason], prefill_beside_decoding=40)
    with caplog.at_level(logging.WARNING, "jaxspec"):
        _, plan = plan_engine(models, options)
    assert plan.beside == 0 and not plan.mixed_sizes
    assert "prefill_beside_decoding has no effect: " in caplog.text and reason in caplog.text
    caplog.clear()
    by_default = dataclasses.replace(
        options, prefill_beside_decoding=EngineOptions.prefill_beside_decoding
    )
    with caplog.at_level(logging.INFO, "jaxspec"):
        plan_engine(models, by_default)
    assert "prefill_beside_decoding" not in caplog.text


def test_a_target_of_somebody_else_is_shown_chunks_as_one_row():
    class Other(Qwen3):
        rows_may_continue = False

    plan, ours = engine_with().plan, opened().models
    assert "one row" in why_not(plan, Models(Other(ours.target.config)))
    assert why_not(plan, ours) is None


def test_chunks_are_whole_rows_for_every_batch_that_leaves_two_slots():
    sizes = dict(max_batch=6, batch_sizes=None, prefill_shapes=None, driver="overlapped")
    plan_of = lambda tokens: plan_engine(
        opened().models, EngineOptions(**{**HOUSE, **sizes}, prefill_beside_decoding=tokens)
    )[1]
    assert [plan_of(tokens).beside for tokens in (1, 8, 60)] == [8, 8, 56]
    mixed = [one for one in plan_of(60).every_decode(draws=False) if one.beside]
    assert [(one.batch, one.width, one.beside) for one in mixed] == [
        (1, 8, 56),
        (2, 8, 56),
        (4, 8, 56),
    ]
    assert all(one.drafting is not None and not one.apart for one in mixed)


def test_the_kernels_report_has_the_sizes_of_mixed_steps():
    options = EngineOptions(**{"driver": "overlapped", **HOUSE}, prefill_beside_decoding=24)
    models, plan = plan_engine(opened().models, options)
    written = [use for use in kernel_uses(models, plan) if use.op == "paged_attention"]
    assert any((4 + 3, 8) in use.sizes for use in written if use.model == "target")


def test_the_option_is_checked():
    assert EngineOptions(prefill_beside_decoding=0).prefill_beside_decoding == 0
    with pytest.raises(UsageError, match="prefill_beside_decoding is -1; expected 0 or more"):
        EngineOptions(prefill_beside_decoding=-1)
