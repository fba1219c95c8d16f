"""What one program reads, how much is read between two decode steps, and who is passed by whom."""

import dataclasses
import itertools

import pytest
from fake_device import continuation, fake_engine
from golden_pair import ALL_SIZES, HOUSE, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from unpacked import chunk_of

from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Shapes, shapes_for
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.admission import LOOKED_AT
from jaxspec.engine.schedule.prefill import Chunk, choose_chunk, chunks_of
from jaxspec.engine.step.observer import StepObserver
from jaxspec.errors import UsageError

SHAPES = shapes_for(32, 512, exact=False)
LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=12)
SOME_SHAPES = st.sampled_from(
    [
        SHAPES,
        shapes_for(2, 512, exact=False),
        shapes_for(8, 512, exact=True),
        shapes_for(3, 7, exact=False),
        Shapes((4,), ((4, 64),)),
        Shapes((4,), ((2, 16), (1, 512), (4, 512))),
    ]
)
MUCH = 10**6


def chosen(left, budget=MUCH, others_first=False, must=True):
    chunk = choose_chunk(SHAPES, left, budget, must, others_first)
    return None if chunk is None else (chunk.batch, chunk.width, chunk.rows)


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


# Which programs there are


@pytest.mark.parametrize(
    ("max_batch", "width", "sizes"),
    [
        (32, 16, (1, 2, 4, 8, 16, 24, 32)),
        (64, 8, (1, 2, 4, 8, 16, 32, 48, 64)),
        (40, 16, (1, 2, 4, 8, 16, 24, 32, 40)),
        (20, 16, (1, 2, 4, 8, 16, 20)),
        (32, 1, (1, 2, 4, 8, 16, 32)),
        (8, 16, (1, 2, 4, 8)),
        (1, 16, (1,)),
    ],
)
def test_between_batches_whose_steps_are_arithmetic_is_one_halfway(max_batch, width, sizes):
    """A step of up to 256 tokens takes about as long as reading the weights."""
    assert shapes_for(max_batch, 512, False, width).batch_sizes == sizes
    assert shapes_for(max_batch, 512, True, width).batch_sizes == (max_batch,)


def test_an_engine_has_the_sizes_for_its_own_width():
    sizes = HOUSE | ALL_SIZES | {"max_batch": 64}
    _, plan = plan_engine(opened().models, EngineOptions(method="dflash", **sizes))
    assert plan.width == 8 and plan.shapes.batch_sizes == (1, 2, 4, 8, 16, 32, 48, 64)


# One program


@pytest.mark.parametrize(
    ("count", "batches"), [(1, [1]), (2, [2]), (3, [2, 1]), (4, [4]), (6, [4, 2]), (8, [4, 4])]
)
def test_wide_prompts_are_read_without_padding_the_batch(count, batches):
    assert [chunk.batch for chunk in chunks_of(SHAPES, [512] * count, MUCH)] == batches


def test_short_prompts_are_padded_because_a_program_reads_the_weights_anyway():
    assert chosen([30]) == (1, 64, (0,))
    assert chosen([30, 30]) == (4, 64, (0, 1))


def test_the_narrow_are_not_read_in_a_wide_program_but_in_places_that_are_free():
    assert chosen([8000, 30, 30]) == (1, 512, (0,))
    assert chosen([30, 8000, 30]) == (4, 64, (0, 2))
    only_fours = Shapes((4,), ((4, 64), (4, 512)))
    assert choose_chunk(only_fours, [8000, 30], MUCH, must=True) == Chunk(4, 512, (0, 1))


def test_who_came_first_leads_every_second_program_and_the_shortest_lead_the_others():
    left = [8000, 4000, 2000, 30]
    assert chosen(left, budget=512) == (1, 512, (0,))
    assert chosen(left, budget=512, others_first=True) == (1, 64, (3,))
    assert chosen(left[:3], budget=512, others_first=True) == (1, 512, (2,))


def test_prompts_with_as_many_programs_left_keep_the_order_in_which_they_came():
    assert chosen([500, 400, 300, 450, 350]) == (4, 512, (0, 1, 2, 3))


def test_a_budget_that_no_program_fits_into_is_exceeded_only_if_there_must_be_one():
    assert chosen([512], budget=100, must=False) is None
    assert chosen([512, 512], budget=100) == (1, 512, (0,))
    assert chosen([512, 30], budget=100, must=False) == (1, 64, (1,))
    assert chosen([], must=True) is None


@given(SOME_SHAPES, LENGTHS, st.integers(1, 5000), st.booleans(), st.booleans())
def test_a_program_fits(shapes, left, budget, must, others_first):
    chunk = choose_chunk(shapes, left, budget, must, others_first)
    fits = [b * w <= budget for b, w in shapes.prefill_shapes]
    if chunk is None:
        assert not must and not all(fits)
        return
    assert (chunk.batch, chunk.width) in shapes.prefill_shapes
    assert 1 <= len(chunk.rows) <= chunk.batch and len({*chunk.rows}) == len(chunk.rows)
    assert [*chunk.rows] == sorted(chunk.rows) and chunk.rows[-1] < len(left)
    assert must or chunk.tokens <= budget
    if not others_first and all(fits):
        assert 0 in chunk.rows


@settings(deadline=None)
@given(SOME_SHAPES, LENGTHS, st.integers(1, 5000), st.sampled_from([0, 16, 64, 4096]))
def test_every_prompt_is_read_and_who_came_first_waits_for_two_budgets_at_most(
    shapes, left, budget, saves_every
):
    rest, waited = list(left), 0
    halts = [(count - 1) // saves_every * saves_every if saves_every else 0 for count in left]
    most = 2 * max(budget, *(batch * width for batch, width in shapes.prefill_shapes))
    for chunk in chunks_of(shapes, left, budget, saves_every):
        first = next(row for row, count in enumerate(rest) if count)
        waited = 0 if first in chunk.rows else waited + chunk.tokens
        assert waited <= most
        assert all(rest[row] for row in chunk.rows)
        for row in chunk.rows:
            read = left[row] - rest[row]
            until_halt = halts[row] - read if read < halts[row] else rest[row]
            rest[row] -= min(chunk.width, until_halt)
    assert not any(rest)


# Between two decode steps


class Programs(StepObserver):
    """Notes the size of each prefill program and the first token of each of its rows, and None for
    a decode step."""

    def __init__(self):
        self.ran = []

    def program(self, step, inputs, static):
        if step.__name__ == "prefill_step":
            chunk = chunk_of(inputs[0])
            rows = zip(chunk.tokens, chunk.counts)
            self.ran.append((chunk.tokens.size, [int(row[0]) for row, count in rows if count]))
        elif step.__name__ in ("decode_step", "verify_step"):
            self.ran.append(None)

    def between_decode_steps(self):
        groups = itertools.groupby(self.ran, key=lambda one: one is None)
        return [list(group) for is_decode, group in groups if not is_decode]


def watched(engine):
    programs = Programs()
    engine.loop.device.observers.append(programs)
    return programs


def run_to_the_end(engine, ids):
    outputs, steps = {}, 0
    while len(outputs) < len(ids):
        for event in engine.step(ids):
            if event.output is not None:
                outputs[event.index] = event.output
        steps += 1
        assert steps < 2000
    return outputs


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["lockstep", "overlapped"]),
    st.sampled_from([1, 5, 10, 15, 40]),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=7),
)
def test_while_someone_decodes_the_budget_holds_and_nobody_is_read_twice(
    driver, budget, exact, requests
):
    engine = fake_engine(driver, "dflash", exact, num_slots=4, prefill_budget=budget)
    early = engine.submit([9, 8, 7], greedy(40))
    while engine.loop.ledger.running == {} or engine.loop.ledger.running[early].num_tokens < 2:
        engine.step([early])
    programs = watched(engine)
    prompts = {
        engine.submit([1 + i] * prompt, greedy(out)): ([1 + i] * prompt, out)
        for i, (prompt, out) in enumerate(requests)
    }
    ended = False
    while not ended:
        ended = any(event.output for event in engine.step([early]))
    least = min(batch * width for batch, width in engine.plan.shapes.prefill_shapes)
    for group in programs.between_decode_steps():
        assert sum(tokens for tokens, _ in group) <= max(budget, least)
        prompts_read = [first for _, rows in group for first in rows]  # each of one token's copies
        assert len(set(prompts_read)) == len(prompts_read)
    engine.loop.device.observers.remove(programs)
    outputs = run_to_the_end(engine, [id for id in prompts if is_live(engine, id)])
    for id, output in outputs.items():
        assert list(output.token_ids) == continuation(*prompts[id], True)


def is_live(engine, id):
    ledger = engine.loop.ledger
    return id in ledger.running or any(request.id == id for request in ledger.waiting)


def test_who_decodes_waits_for_one_chunk_of_a_long_prompt():
    engine = fake_engine(num_slots=3, prefill_chunk=5, prefill_budget=40)
    early = engine.submit([9, 8, 7], greedy(40))
    while engine.num_decoding == 0:
        engine.step([early])
    programs = watched(engine)
    engine.submit([1] * 30, greedy(4))
    for _ in range(14):
        engine.step([early])
    assert [one and one[0] for one in programs.ran[:12]] == [5, None] * 6


def test_a_prompt_that_nobody_waits_for_is_read_in_few_steps():
    engine = fake_engine(prefill_budget=40)
    id = engine.submit([1] * 30, greedy(4))
    engine.step([id])
    assert engine.loop.ledger.running[id].is_prefilled


def test_a_short_prompt_does_not_wait_for_a_long_one():
    engine = fake_engine(num_slots=3, num_pages=40, prefill_budget=5)
    early = engine.submit([9, 8, 7], greedy(40))
    while engine.num_decoding == 0:
        engine.step([early])
    long, short = engine.submit([1] * 30, greedy(4)), engine.submit([2] * 4, greedy(4))
    seen = []
    while short not in seen:
        seen += [event.index for event in engine.step([early, long, short])]
    assert engine.loop.ledger.running[long].prefilled <= 15


def test_requests_that_come_together_are_read_before_the_first_of_them_decodes():
    engine = fake_engine(num_slots=4, num_pages=60, prefill_chunk=5, prefill_budget=10)
    programs = watched(engine)
    run_to_the_end(engine, [engine.submit([1 + i] * 5, greedy(6)) for i in range(4)])
    assert [one and one[0] for one in programs.ran[:3]] == [10, 10, None]


def test_the_budget_is_an_option_with_the_name_that_others_have():
    assert EngineOptions(prefill_budget=1).prefill_budget == 1
    with pytest.raises(UsageError, match="prefill_budget is 0; expected at least 1"):
        EngineOptions(prefill_budget=0)


# Pages


def small_pool(num_slots=6):
    """Ten pages of four positions; a request writes four positions beyond its budget."""
    return fake_engine(num_slots=num_slots, num_pages=11, page_size=4, prefix_caching=False)


def test_a_small_request_passes_one_that_finds_no_room():
    engine = small_pool()
    first = engine.submit([1] * 8, greedy(9))  # five pages
    engine.step([first])
    large, small = engine.submit([2] * 20, greedy(13)), engine.submit([3] * 2, greedy(3))
    engine.step([first])
    assert {*engine.loop.ledger.running} == {first, small}
    [waits] = engine.loop.ledger.waiting
    assert waits.id == large and waits.passed_pages == 2
    outputs = run_to_the_end(engine, [first, large, small])
    assert list(outputs[large].token_ids) == continuation([2] * 20, 13, True)


def test_nobody_starves_however_many_small_requests_come():
    engine = small_pool()
    ids = [engine.submit([3, 1], greedy(9)), engine.submit([3, 2], greedy(14))]
    engine.step(ids)
    large = engine.submit([2] * 20, greedy(13))
    for number in itertools.count(3):
        ids.append(engine.submit([3, number], greedy(9)))
        if any(event.index == large for event in engine.step([*ids, large])):
            break
        assert number < 100
    need = engine.loop.ledger.book.pages_for(engine.plan.positions_of(20 + 13 - 1))
    passed = [id for id in ids if id > large and not is_waiting(engine, id)]
    most_each = engine.loop.ledger.book.pages_for(engine.plan.positions_of(2 + 9 - 1))
    assert 0 < len(passed) <= -(-need // most_each)


def is_waiting(engine, id):
    return any(request.id == id for request in engine.loop.ledger.waiting)


def test_only_so_many_of_a_long_queue_are_looked_at():
    engine = small_pool(num_slots=2)
    first = engine.submit([1] * 8, greedy(9))
    engine.step([first])
    large = [engine.submit([2] * 20, greedy(13)) for _ in range(LOOKED_AT)]
    small = engine.submit([3] * 2, greedy(3))
    engine.step([first])
    assert is_waiting(engine, small) and all(is_waiting(engine, id) for id in large)
    engine.abort(large[0])
    engine.step([first])
    assert small in engine.loop.ledger.running


def test_a_suspect_that_passed_others_is_tried_alone_and_ends_right():
    engine = small_pool()
    first = engine.submit([1] * 8, greedy(9))
    engine.step([first])
    large, small = engine.submit([2] * 20, greedy(13)), engine.submit([3] * 2, greedy(6))
    admit, failures = engine.loop._admit_on_device, ["once"]

    def fails_once(ids):
        if small in ids and failures:
            failures.pop()
            raise MemoryError("no memory for the admission")
        admit(ids)

    engine.loop._admit_on_device = fails_once
    outputs = run_to_the_end(engine, [first, large, small])
    assert not failures and [output.error for output in outputs.values()] == [None] * 3
    for id, (prompt, count) in {
        first: ([1] * 8, 9),
        large: ([2] * 20, 13),
        small: ([3] * 2, 6),
    }.items():
        assert list(outputs[id].token_ids) == continuation(prompt, count, True)


def test_a_suspect_without_room_waits_while_the_others_run():
    engine = small_pool()
    first = engine.submit([1] * 8, greedy(9))
    engine.step([first])
    large = engine.submit([2] * 20, greedy(13))
    ledger = engine.loop.ledger
    engine.loop.ledger = dataclasses.replace(ledger, suspects={large: 0})
    outputs = run_to_the_end(engine, [first, large])
    assert [output.error for output in outputs.values()] == [None, None]


class Admissions(StepObserver):
    """The slots that each program of this kind gives away."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = []

    def program(self, step, inputs, static) -> None:
        if step.__name__ == "admit_step":
            self.slots.append(inputs[0].integers[:, 0].tolist())


def test_requests_that_come_together_get_their_slots_by_one_program():
    """Up to as many as a program reads prompts of; a program for fewer repeats one of them."""
    engine, admissions = fake_engine(num_slots=8), Admissions()
    prompts = [[number + 1] * 3 for number in range(6)]
    with engine.observe(admissions):
        ids = [engine.submit(prompt, greedy(5)) for prompt in prompts]
        outputs = run_to_the_end(engine, ids)
    most = engine.plan.shapes.largest_prefill
    assert [len(slots) for slots in admissions.slots] == [most, most]
    assert [len(set(slots)) for slots in admissions.slots] == [4, 2]
    for id, prompt in zip(ids, prompts):
        assert list(outputs[id].token_ids) == continuation(prompt, 5, True)
