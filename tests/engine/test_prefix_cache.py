"""What was read once is found again: through the engine's loop, on the device of numpy functions,
whose next token depends on every row that a slot's pages hold."""

import golden_pair
import jaxtyping
import pytest
from book_checks import check_book, check_contents
from fake_device import continuation, fake_engine
from golden_pair import budget
from unpacked import chunk_of

from jaxspec.engine.engine import Engine
from jaxspec.engine.schedule import page_index
from jaxspec.engine.step.steps import prefill_step
from jaxspec.errors import UsageError
from jaxspec.measure.engines import engine_for
from jaxspec.proposers.methods import METHODS

PAGE = 4
TEXT = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
"""Five pages."""


def cached(output) -> int:
    return output.stats.cached_tokens


def check(engine: Engine) -> None:
    book, state = engine.loop.ledger.book, engine.loop.device.state
    check_book(book, engine.loop.plan.num_pages)
    check_contents(book, state.cells, state.context)


def read_by(engine: Engine) -> list[int]:
    """How many tokens every prefill step from now on reads."""
    run, counts = engine.loop.device.run, []

    def counting(step, *inputs, **static):
        if step is prefill_step:
            counts.append(int(sum(chunk_of(inputs[0]).counts)))
        return run(step, *inputs, **static)

    engine.loop.device.run = counting
    return counts


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("method", [name for name in METHODS if name in "dflash+ngram none"])
def test_a_repeat_reads_the_rest_and_gets_the_same_tokens(driver, method):
    engine = fake_engine(driver, method)
    first = engine.generate(TEXT[:18], budget(9))
    counts = read_by(engine)
    again = engine.generate(TEXT[:18], budget(9))
    assert (cached(first), cached(again)) == (0, 16) and sum(counts) == 2
    assert list(again.token_ids) == continuation(TEXT[:18], 9, True)
    assert again.stats.acceptance_lengths == first.stats.acceptance_lengths
    check(engine)


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 17])
def test_every_length_finds_all_its_whole_pages_but_never_the_last_token(length):
    engine = fake_engine()
    engine.generate(TEXT, budget(1))
    counts = read_by(engine)
    output = engine.generate(TEXT[:length], budget(5))
    assert cached(output) == (length - 1) // PAGE * PAGE
    assert sum(counts) == length - cached(output) >= 1
    assert list(output.token_ids) == continuation(TEXT[:length], 5, True)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 7, 11])
def test_the_second_turn_finds_the_output_of_the_first_without_its_newest_token(driver, tokens):
    engine = fake_engine(driver)
    first = engine.generate(TEXT[:6], budget(tokens))
    turn = [*TEXT[:6], *first.token_ids, 1, 2, 3, 4]
    check(engine)
    second = engine.generate(turn, budget(8))
    assert cached(second) == (6 + tokens - 1) // PAGE * PAGE
    assert list(second.token_ids) == continuation(turn, 8, True)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 7])
def test_a_stop_in_the_middle_of_a_step_caches_no_more_than_the_text(stop_at):
    """The device went on to the end of its block."""
    engine = fake_engine()
    told = continuation(TEXT[:6], 12, True)
    output = engine.generate(TEXT[:6], budget(12, stop_token_ids=[told[stop_at - 1]]))
    check(engine)
    turn = [*TEXT[:6], *output.token_ids, 7, 7, 7, 7]
    second = engine.generate(turn, budget(4))
    assert cached(second) == (6 + len(output.token_ids) - 1) // PAGE * PAGE
    assert list(second.token_ids) == continuation(turn, 4, True)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_an_aborted_request_leaves_what_it_had_read(driver, steps):
    engine = fake_engine(driver, prefill_budget=5)
    id = engine.submit(TEXT, budget(12))
    for _ in range(steps):
        engine.step([id])
    engine.abort(id)
    assert engine.free_pages == engine.total_pages
    output = engine.generate(TEXT, budget(6))
    assert cached(output) == min(steps * 5 // PAGE * PAGE, 16)
    assert list(output.token_ids) == continuation(TEXT, 6, True)
    check(engine)


def test_without_speculation_pages_are_whole_too():
    """The drafter's rows are written in plain steps as well, so a repeat drafts as well."""
    engine = fake_engine()
    engine.generate(TEXT[:6], budget(12, speculate=False))
    turn = [*TEXT[:6], *continuation(TEXT[:6], 12, True)]
    found, cold = engine.generate(turn, budget(10)), fake_engine().generate(turn, budget(10))
    assert cached(found) == 16 and not cached(cold)
    assert found.stats.acceptance_lengths == cold.stats.acceptance_lengths
    check(engine)


def test_copies_that_come_together_share_as_soon_as_one_was_read_and_wait_for_nobody():
    sizes = dict(num_slots=12, num_pages=120, prefill_budget=20)
    engine, alone = fake_engine(**sizes), fake_engine(**sizes, prefix_caching=False)
    counts, all_counts = read_by(engine), read_by(alone)
    outputs = engine.generate([TEXT] * 12, budget(6))
    for output in (*outputs, *alone.generate([TEXT] * 12, budget(6))):
        assert list(output.token_ids) == continuation(TEXT, 6, True)
    assert [cached(output) for output in outputs] == [0] * 4 + [16] * 8
    assert sum(counts) == 4 * 20 + 8 * 4 and sum(all_counts) == 12 * 20
    assert len(counts) < len(all_counts)
    check(engine)


def test_pages_that_are_found_count_as_free_for_whoever_waits():
    """Nine pages each, in a pool of 13: with five in common two fit."""
    engine = fake_engine(num_pages=14, num_slots=2)
    text = [*TEXT, 1]
    engine.generate(text, budget(1))
    a, b = (engine.submit([*text, last], budget(9)) for last in (1, 2))
    engine.step([a, b])
    assert engine.num_running == 2 and engine.free_pages == 0
    together = fake_engine(num_pages=14, num_slots=2)
    c, d = (together.submit([*text, last], budget(9)) for last in (1, 2))
    together.step([c, d])
    assert together.num_running == 1
    for one, ids in ((engine, (a, b)), (together, (c, d))):
        outputs = {}
        while not one.loop.idle:
            outputs |= {event.index: event.output for event in one.step(ids) if event.output}
        for id, last in zip(ids, (1, 2)):
            assert list(outputs[id].token_ids) == continuation([*text, last], 9, True)
        assert one.free_pages == one.total_pages
        check(one)


def test_who_waits_for_pages_looks_again_only_when_something_changed(monkeypatch):
    engine = fake_engine(num_pages=12, num_slots=2)
    looks, find = [], page_index.find
    monkeypatch.setattr(page_index, "find", lambda *a: looks.append(a) or find(*a))
    first = engine.submit([1] * 3, budget(20))
    second = engine.submit([2] * 8, budget(24))
    engine.step([first, second])
    assert engine.num_waiting == 1
    counts = []
    while engine.num_waiting:
        before = len(looks)
        engine.step([first, second])
        counts.append(len(looks) - before)
    assert sum(counts[:-1]) <= 2 and len(counts) > 5 and counts[-1]


def test_salts_keep_tenants_apart():
    engine = fake_engine()
    salted = lambda salt: {"prompt_token_ids": TEXT, "cache_salt": salt}
    prompts = [TEXT, salted("a"), salted("b"), salted("a"), TEXT, salted(None)]
    hits = [cached(engine.generate(prompt, budget(3))) for prompt in prompts]
    assert hits == [0, 0, 0, 16, 16, 16]


@pytest.mark.parametrize("salt", ["", 3, b"a", ["a"], True])
def test_a_salt_that_is_no_text_is_refused(salt, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run
    engine = fake_engine()
    with pytest.raises(UsageError, match="cache_salt is .*; expected None or a text"):
        engine.generate({"prompt_token_ids": [1, 2], "cache_salt": salt}, budget(3))
    assert engine.loop.idle


def test_counters_are_of_tokens():
    engine = fake_engine()
    for length in (18, 18, 7):
        engine.generate(TEXT[:length], budget(3))
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18 + 18 + 7, 16 + 4)
    assert stats.pages_in_use == 0


def test_after_a_reset_nothing_is_found_and_who_runs_goes_on():
    engine = fake_engine()
    id, tokens = engine.submit(TEXT, budget(12)), []
    for _ in range(6):
        tokens += [token for event in engine.step([id]) for token in event.token_ids]
    engine.reset_prefix_cache()
    assert not engine.loop.ledger.book.index.entries
    while not engine.loop.idle:
        tokens += [token for event in engine.step([id]) for token in event.token_ids]
    assert tokens == continuation(TEXT, 12, True)
    assert not engine.loop.ledger.book.index.entries, "what was read before the reset stays out"
    outputs = [engine.generate(TEXT, budget(3)) for _ in range(2)]
    assert [cached(output) for output in outputs] == [0, 16]


def test_a_closed_engine_refuses_a_reset():
    engine = fake_engine()
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.reset_prefix_cache()


@pytest.mark.parametrize("fault", ["before", "donated", "read", "unread"])
@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_after_a_fault_requests_that_shared_pages_have_their_tokens(fault, at):
    """The pools are new: nothing is found in them that was not read again. Whoever comes second
    begins behind what the first has read again."""
    engine = fake_engine()
    engine.generate(TEXT, budget(1))
    engine.loop.device.faults = [*[None] * at, fault]
    prompts = [[*TEXT, last] for last in (1, 2, 3)]
    outputs = engine.generate(prompts, budget(9))
    for prompt, output in zip(prompts, outputs):
        assert (list(output.token_ids), output.error) == (continuation(prompt, 9, True), None)
        assert cached(output) == 20
    stats = engine.stats()
    assert stats.prefix_cache_hits == 60 and stats.prefix_cache_queries == 83
    assert engine.free_pages == engine.total_pages
    check(engine)


def test_pages_of_a_request_whose_logits_are_not_finite_are_not_found():
    engine = fake_engine()
    prompt = [*TEXT[:8], 48, 1, 2]
    outputs = [engine.generate(prompt, budget(9), errors="return") for _ in range(2)]
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert [cached(output) for output in outputs] == [0, 0]


def test_a_lent_device_may_be_written_to():
    engine = fake_engine()
    engine.generate(TEXT, budget(3))
    with pytest.raises(AttributeError):  # the fake has no empty state to go back to
        with engine.borrow_device():
            assert not engine.loop.ledger.book.index.entries
    assert not engine.loop.ledger.book.index.entries


def test_nothing_is_found_if_the_option_is_off():
    engine = fake_engine(prefix_caching=False)
    outputs = [engine.generate(TEXT, budget(5)) for _ in range(2)]
    assert [cached(output) for output in outputs] == [0, 0]
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)
    book = engine.loop.ledger.book
    assert not (book.index.entries or book.index.chains)


def test_requests_that_want_log_probabilities_of_their_prompt_read_all_of_it():
    engine = fake_engine()
    engine.generate(TEXT, budget(1))
    scored = engine.generate([1, *TEXT], budget(3, prompt_logprobs=0))
    again = engine.generate([1, *TEXT], budget(3, prompt_logprobs=0))
    assert (cached(scored), cached(again)) == (0, 0)
    assert again.prompt_logprobs == scored.prompt_logprobs and len(again.prompt_logprobs) == 21
    assert engine.stats().prefix_cache_queries == len(TEXT)
    assert cached(engine.generate([1, *TEXT], budget(3))) == 20, "others find what they read"


def test_steps_between_admission_and_end_leave_the_book_alone():
    """So they cost the same with any number of pages."""
    engine = fake_engine(prefill_chunk=4)
    ids = [engine.submit(TEXT, budget(24)), engine.submit([1, 2], budget(40))]
    engine.step(ids)
    book = engine.loop.ledger.book
    for _ in range(6):
        engine.step(ids)
        assert engine.loop.ledger.book is book


def test_measurements_read_every_prompt_unless_asked(monkeypatch):
    given, engine = [], fake_engine()

    def from_models(*args, **options):
        given.append(options["prefix_caching"])
        return engine

    monkeypatch.setattr(Engine, "from_models", staticmethod(from_models))
    opened = golden_pair.opened()
    engine_for(opened, "dflash", [1], [8])
    engine_for(opened, "dflash", [1], [8], prefix_caching=True)
    assert given == [False, True]
