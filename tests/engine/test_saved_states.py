"""Targets whose layers keep one state per request: what was read once is found again, up to the
last page whose state was saved. On the device of numpy functions, whose states are the texts that
made them."""

import pytest
from book_checks import check_book, check_contents, check_states
from fake_device import continuation, fake_engine
from golden_pair import budget
from unpacked import chunk_of

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.steps import copy_step, prefill_step
from jaxspec.proposers.methods import METHODS

PAGE = 4
TEXT = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
"""Five pages."""
NAMES = [name for name in METHODS if name in "dflash+ngram none"]


def engine_with(snapshots: int = 6, driver: str = "overlapped", method: str = "dflash", **sizes):
    return fake_engine(driver, method, num_snapshots=snapshots, **sizes)


def cached(output) -> int:
    return output.stats.cached_tokens


def check(engine: Engine) -> int:
    loop = engine.loop
    book, state = loop.ledger.book, loop.device.state
    check_book(book, loop.plan.num_pages)
    check_contents(book, state.cells, state.context)
    return check_states(book, state.states, loop.plan.first_snapshot)


def is_right(output, prompt, count) -> bool:
    assert output.error is None, output.error
    return list(output.token_ids) == continuation(list(prompt), count, True)


def runs_of(engine: Engine) -> list[tuple]:
    """What every prefill step from now on reads, and every copy."""
    run, runs = engine.loop.device.run, []

    def watched(step, *inputs, **static):
        if step is prefill_step:
            runs.append((int(chunk_of(inputs[0]).starts[0]), int(chunk_of(inputs[0]).counts[0])))
        if step is copy_step:
            runs.append(tuple(map(int, inputs)))
        return run(step, *inputs, **static)

    engine.loop.device.run = watched
    return runs


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("method", NAMES)
def test_a_repeat_reads_the_rest_and_gets_the_same_tokens(driver, method):
    engine = engine_with(driver=driver, method=method)
    first, again = (engine.generate(TEXT[:18], budget(9)) for _ in range(2))
    assert (cached(first), cached(again)) == (0, 16)
    assert is_right(again, TEXT[:18], 9)
    assert again.stats.acceptance_lengths == first.stats.acceptance_lengths
    assert check(engine) == 1


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 17, 20])
def test_a_state_is_saved_at_the_last_page_before_the_end_of_a_prompt(length):
    engine = engine_with()
    for expected in (0, (length - 1) // PAGE * PAGE):
        output = engine.generate(TEXT[:length], budget(5))
        assert cached(output) == expected and is_right(output, TEXT[:length], 5)
    assert check(engine) == (length > PAGE)


def test_what_is_read_and_copied_for_a_prompt_and_for_its_repeat():
    """Slots 0 to 2, the padding slot 3, and saved states from row 4 on."""
    engine = engine_with(prefill_chunk=10)
    runs = runs_of(engine)
    engine.generate(TEXT[:18], budget(1))
    assert runs == [(0, 10), (10, 6), (0, 4), (16, 2)]
    runs.clear()
    engine.generate(TEXT[:18], budget(1))
    assert runs == [(4, 0), (16, 2)]


def test_where_a_prompt_parts_from_a_known_text_a_state_is_saved_for_the_next():
    engine = engine_with()
    prompts = [[*TEXT[:12], *([last] * 7)] for last in (1, 2, 3)]
    outputs = [engine.generate(prompt, budget(4)) for prompt in prompts]
    assert [cached(output) for output in outputs] == [0, 0, 12]
    assert all(is_right(output, prompt, 4) for output, prompt in zip(outputs, prompts))
    again = [engine.generate(prompt, budget(4)) for prompt in prompts]
    assert [cached(output) for output in again] == [16] * 3
    assert check(engine) == 4


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("tokens", [1, 3, 7, 11])
def test_the_second_turn_begins_where_the_first_prompt_was_saved(driver, tokens):
    """And the third behind all that the first has said, which the second had to read again."""
    engine = engine_with(driver=driver)
    prompt, begins = TEXT[:6], [0, 4, (6 + tokens + 4 - 1) // PAGE * PAGE]
    for begin in begins:
        output = engine.generate(prompt, budget(tokens))
        assert cached(output) == begin and is_right(output, prompt, tokens)
        prompt = [*prompt, *output.token_ids, 1, 2, 3, 4]
    check(engine)


def test_copies_that_come_together_save_once_and_share_as_soon_as_one_was_read():
    engine = engine_with(num_slots=12, num_pages=120, prefill_chunk=20, prefill_budget=80)
    runs = runs_of(engine)
    outputs = engine.generate([TEXT] * 12, budget(6))
    assert all(is_right(output, TEXT, 6) for output in outputs)
    assert [cached(output) for output in outputs] == [0] * 4 + [16] * 8
    assert runs.count((0, 13)) == 1, "one of the four that were read together has saved"
    assert check(engine) == 1


def test_copies_whose_first_is_still_being_read_save_nothing_where_it_is():
    engine = engine_with(num_slots=12, num_pages=120, prefill_chunk=5, prefill_budget=20)
    outputs = engine.generate([TEXT] * 12, budget(6))
    assert all(is_right(output, TEXT, 6) for output in outputs)
    assert check(engine) == 1


def test_a_mixed_batch():
    engine = engine_with(method="dflash+ngram", num_slots=4, num_pages=60)
    engine.generate(TEXT, budget(3))
    prompts = [TEXT, [7, 7], [*TEXT[:9], 1], [*TEXT, 1, 2, 3], [3] * 9]
    params = [budget(9), budget(5), budget(7, speculate=False), budget(8), budget(1)]
    outputs = engine.generate(prompts, params)
    assert [cached(output) for output in outputs] == [16, 0, 0, 16, 0]
    for output, prompt, one in zip(outputs, prompts, params):
        assert is_right(output, prompt, one.max_tokens)
    check(engine)


@pytest.mark.parametrize("snapshots", [1, 2])
def test_with_few_rows_the_least_recently_used_state_goes(snapshots):
    engine = engine_with(snapshots, num_pages=60)
    texts = [[number] * 9 for number in range(3)]
    ask = lambda which: cached(engine.generate(texts[which], budget(2)))
    assert [ask(0), ask(0), ask(1), ask(1)] == [0, 8, 0, 8]
    assert ask(0) == (8 if snapshots == 2 else 0)
    assert (ask(2), ask(2)) == (0, 8)
    assert ask(0) == (8 if snapshots == 2 else 0), "used after the other, and saved last"
    assert ask(1) == 0
    assert check(engine) == snapshots


def test_a_page_that_is_handed_out_takes_its_state_with_it():
    engine = engine_with(num_pages=12, num_slots=1)
    engine.generate(TEXT[:9], budget(2))
    assert len(engine.loop.ledger.book.index.states.of_texts) == 1
    output = engine.generate([8] * 5, budget(34))
    assert is_right(output, [8] * 5, 34)
    states = engine.loop.ledger.book.index.states
    assert all(key in engine.loop.ledger.book.index.entries for key in states.of_texts)
    assert cached(engine.generate(TEXT[:9], budget(2))) == 0
    check(engine)


def test_salts_keep_tenants_apart():
    engine = engine_with(num_pages=60)
    salted = lambda salt: {"prompt_token_ids": TEXT, "cache_salt": salt}
    prompts = [TEXT, salted("a"), salted("b"), salted("a"), TEXT]
    assert [cached(engine.generate(prompt, budget(3))) for prompt in prompts] == [0, 0, 0, 16, 16]
    assert check(engine) == 3


@pytest.mark.parametrize("fault", ["before", "donated", "read", "unread"])
@pytest.mark.parametrize("at", (0, 1, 3, 6, 8))
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_after_a_fault_everything_is_forgotten_and_tokens_are_right(driver, fault, at):
    """Faults also hit the programs that copy states. Whoever comes second begins behind what the
    first has read again."""
    engine = engine_with(driver=driver)
    engine.generate(TEXT, budget(1))
    engine.loop.device.faults = [*[None] * at, fault]
    prompts = [[*TEXT[:14], last] for last in (1, 2, 3)]
    outputs = engine.generate(prompts, budget(9))
    assert not engine.loop.device.faults
    assert all(is_right(output, prompt, 9) for output, prompt in zip(outputs, prompts))
    assert engine.free_pages == engine.total_pages
    stats = engine.stats()
    assert stats.prefix_cache_hits == sum(map(cached, outputs))
    check(engine)


@pytest.mark.parametrize("steps", range(7))
def test_an_aborted_request_leaves_the_states_that_it_has_saved(steps):
    engine = engine_with(prefill_budget=5)
    id = engine.submit(TEXT, budget(12))
    for _ in range(steps):
        engine.step([id])
    engine.abort(id)
    check(engine)
    output = engine.generate(TEXT, budget(6))
    assert cached(output) == (16 if steps >= 4 else 0) and is_right(output, TEXT, 6)
    check(engine)


def test_states_of_a_request_whose_logits_are_not_finite_are_not_found():
    engine = engine_with()
    prompt = [*TEXT[:8], 48, 1, 2, 3, 4]
    for _ in range(2):
        output = engine.generate(prompt, budget(9), errors="return")
        assert (output.finish_reason, cached(output)) == ("error", 0)
    assert not engine.loop.ledger.book.index.states.of_texts
    check(engine)


def test_the_state_that_such_a_request_has_saved_for_another_s_pages_is_not_found_either():
    engine = engine_with()
    engine.generate([*TEXT[:8], 1, 2, 3], budget(1))
    states = lambda: engine.loop.ledger.book.index.states.of_texts
    before = {*states()}
    output = engine.generate([*TEXT[:4], 48, *[1] * 8], budget(9), errors="return")
    assert output.finish_reason == "error" and {*states()} == before
    check(engine)


def test_after_a_reset_nothing_is_found_and_who_runs_goes_on():
    engine = engine_with()
    id, told = engine.submit(TEXT, budget(12)), []
    for _ in range(3):
        told += [token for event in engine.step([id]) for token in event.token_ids]
    engine.reset_prefix_cache()
    while not engine.loop.idle:
        told += [token for event in engine.step([id]) for token in event.token_ids]
    assert told == continuation(TEXT, 12, True)
    states = engine.loop.ledger.book.index.states
    assert not states.of_texts and len(states.free) == 6
    assert [cached(engine.generate(TEXT, budget(3))) for _ in range(2)] == [0, 16]


def test_requests_that_want_log_probabilities_of_their_prompt_read_all_of_it_without_a_halt():
    engine = engine_with(prefill_chunk=30, prefill_budget=30)
    engine.generate(TEXT, budget(1))
    runs = runs_of(engine)
    scored = engine.generate([1, *TEXT], budget(3, prompt_logprobs=0))
    assert cached(scored) == 0 and len(scored.prompt_logprobs) == 21
    assert runs == [(0, 21)]
    check(engine)


def test_exact_makes_no_halt_of_its_own():
    """It saves only where every reading makes one: here at common multiples of 6 and 4."""
    engine = engine_with(exact=True, prefill_chunk=6, num_pages=60)
    text = [*TEXT, *TEXT[:7]]
    runs = runs_of(engine)
    first = engine.generate(text, budget(3))
    assert runs == [(0, 6), (6, 6), (12, 6), (18, 6), (0, 4), (24, 3)]
    prompts = [text, [*text[:23], 1, 2, 3], [*text[:23], 1, 2, 4], [*text[:13], 9]]
    outputs = [engine.generate(prompt, budget(3)) for prompt in prompts]
    assert [cached(output) for output in (first, *outputs)] == [0, 24, 0, 24, 12]
    assert all(is_right(output, prompt, 3) for output, prompt in zip(outputs, prompts))
    check(engine)
