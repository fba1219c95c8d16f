"""Any life of an engine: prompts come, stream, are left, fail; on the device of numpy functions."""

import itertools

from fake_device import CURSED, EOS, OVERFLOWS, POISON, continuation, fake_engine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxspec.engine.requests.sampling_params import SamplingParams

PROMPTS = st.lists(st.integers(1, OVERFLOWS - 1), min_size=1, max_size=30)
BUDGETS = st.integers(1, 20)
MANY_STEPS = 4000


class Consumer:
    """One stream, and what should come out of it."""

    def __init__(self, engine, prompts, budgets, ignore_eos):
        self.expected = [continuation(*p, ignore_eos) for p in zip(prompts, budgets)]
        self.ignore_eos = ignore_eos
        self.cursed = [CURSED in prompt for prompt in prompts]
        self.tokens = [[] for _ in prompts]
        params = [SamplingParams(max_tokens=b, ignore_eos=ignore_eos) for b in budgets]
        self.events = engine.stream(prompts, params, errors="return")

    def take_one(self) -> bool:
        """Checks the next event; False where the stream has ended."""
        event = next(self.events, None)
        if event is None:
            return False
        told, expected = self.tokens[event.index], self.expected[event.index]
        told.extend(event.token_ids)
        assert told == expected[: len(told)]
        if event.output is not None:
            self._check_whole(event.output, told, expected, self.cursed[event.index])
        return True

    def _check_whole(self, output, told, expected, cursed) -> None:
        assert list(output.token_ids) == told
        if cursed:
            assert output.finish_reason == "error" and output.error.startswith("Fault: ")
        else:
            assert output.error is None and told == expected
            stopped = told[-1] == EOS and not self.ignore_eos
            assert output.finish_reason == ("stop" if stopped else "length")


class Life(RuleBasedStateMachine):
    @initialize(
        driver=st.sampled_from(["lockstep", "overlapped"]),
        method=st.sampled_from(["dflash", "none", "ngram", "dflash+ngram"]),
        exact=st.booleans(),
        curse=st.sampled_from(["before", "donated", "read"]),
    )
    def begin(self, driver, method, exact, curse):
        self.engine = fake_engine(driver, method, exact)
        self.loop, self.device = self.engine.loop, self.engine.loop.device
        self.device.curse = curse
        self.device.may_fail = lambda: not self.loop.ledger.suspects
        self.consumers: list[Consumer] = []

    @rule(
        requests=st.lists(st.tuples(PROMPTS, BUDGETS), min_size=1, max_size=4),
        ignore_eos=st.booleans(),
    )
    def come(self, requests, ignore_eos):
        requests = [(prompt[: 47 - budget], budget) for prompt, budget in requests]
        self.consumers.append(Consumer(self.engine, *zip(*requests), ignore_eos))

    @rule(prompt=PROMPTS, at=st.integers(0, 30))
    def come_with_a_curse(self, prompt, at):
        self.consumers.append(Consumer(self.engine, [[*prompt[:at], CURSED]], [5], True))

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.loop.step()

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), times=st.integers(1, 3))
    def take(self, data, times):
        consumer = data.draw(st.sampled_from(self.consumers))
        self.device.ran.clear()
        if not all(consumer.take_one() for _ in range(times)):
            self.consumers.remove(consumer)
        assert len(self.device.ran) < MANY_STEPS

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def leave(self, data):
        consumer = data.draw(st.sampled_from(self.consumers))
        consumer.take_one()
        consumer.events.close()
        self.consumers.remove(consumer)

    @precondition(lambda self: not self.device.faults)
    @rule(after=st.integers(0, 4), fault=st.sampled_from(["before", "donated", "read"]))
    def fail(self, after, fault):
        self.device.faults = [*itertools.repeat(None, after), fault]

    @rule()
    def poison(self):
        """Every row that no live request has committed may hold anything."""
        state = self.device.state
        if state.deleted:
            return
        live = {
            state.cell(request.slot, at)
            for request in self.loop.ledger.running.values()
            for at in range(state.lengths[request.slot])
        }
        for cell in itertools.product(*map(range, state.cells.shape)):
            if cell not in live:
                state.cells[cell] = state.context[cell] = POISON

    @invariant()
    def every_page_is_free_or_held_once_by_the_living(self):
        book = self.loop.ledger.book
        held = [page for pages in book.held.values() for page in pages]
        assert sorted([*held, *book.free]) == list(range(1, self.loop.plan.num_pages))
        assert set(book.held) == set(self.loop.ledger.running)
        assert self.engine.free_pages + len(held) == self.engine.total_pages

    @invariant()
    def slots_are_held_once(self):
        slots = [request.slot for request in self.loop.ledger.running.values()]
        assert len(set(slots)) == len(slots)

    @invariant()
    def first_come_first_served(self):
        admitted, waiting = list(self.loop.ledger.running), [r.id for r in self.loop.ledger.waiting]
        assert admitted + waiting == sorted(admitted + waiting)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for consumer in self.consumers:
            self.device.ran.clear()
            while consumer.take_one():
                assert len(self.device.ran) < MANY_STEPS
        while not self.loop.idle:
            self.loop.step()
        assert not self.loop.ledger.increments
        assert self.engine.free_pages == self.engine.total_pages


def test_every_life_keeps_pages_order_and_tokens():
    limits = settings(max_examples=120, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Life, settings=limits)


def test_the_fake_notices_a_page_in_two_hands():
    """The oracle's own test: two slots over the same pages give other tokens."""
    engine = fake_engine("lockstep")
    loop, prompts = engine.loop, [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    consumer = Consumer(engine, prompts, [12, 12], True)
    loop.step()
    loop.device.state.page_table[1] = loop.device.state.page_table[0]
    try:
        while consumer.take_one():
            pass
    except AssertionError:
        return
    raise AssertionError("nobody noticed")
