"""Any life of an engine: prompts come, stream, are left, fail; on the device of numpy functions."""

import itertools

from book_checks import check_book, check_contents, findable_pages
from fake_device import CURSED, EOS, OVERFLOWS, POISON, continuation, fake_engine, score
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

TOKENS = st.integers(1, OVERFLOWS - 1)
BEGINNINGS = st.sampled_from([(), (7,) * 4, (1, 2, 3, 4, 5, 6, 7, 8), tuple(range(20, 36))])
"""Of one, two and four pages, which several prompts have."""
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=30),
    st.builds(lambda begin, rest: [*begin, *rest], BEGINNINGS, st.lists(TOKENS, max_size=6)).filter(
        bool
    ),
)
BUDGETS = st.integers(0, 20)
SCORES = st.sampled_from([None, None, 0])
MANY_STEPS = 4000


class Consumer:
    """One stream, and what should come out of it."""

    def __init__(self, engine, prompts, budgets, ignore_eos, scored=()):
        self.expected = [continuation(*p, ignore_eos) for p in zip(prompts, budgets)]
        self.ignore_eos = ignore_eos
        self.cursed = [CURSED in prompt for prompt in prompts]
        self.tokens = [[] for _ in prompts]
        self.prompts, self.scored = prompts, scored or [None] * len(prompts)
        params = [
            SamplingParams(max_tokens=b, ignore_eos=ignore_eos, prompt_logprobs=asked)
            for b, asked in zip(budgets, self.scored)
        ]
        self.events = engine.stream(prompts, params, errors="return")

    def take_one(self) -> bool:
        """Checks the next event; False where the stream has ended."""
        event = next(self.events, None)
        if event is None:
            return False
        told, expected = self.tokens[event.index], self.expected[event.index]
        self._check_scores(event, is_first=not told)
        told.extend(event.token_ids)
        assert told == expected[: len(told)]
        if event.output is not None:
            self._check_whole(event.output, told, expected, self.cursed[event.index])
        return True

    def _check_scores(self, event, is_first) -> None:
        """They come with the first event, unless the prompt could not be read."""
        expected, prompt = None, self.prompts[event.index]
        read = event.token_ids or event.output.finish_reason == "length"
        if self.scored[event.index] is not None and read:
            later = (score(prompt[:at], prompt[at]) for at in range(1, len(prompt)))
            told = zip(prompt[1:], later)
            expected = (None, *({token: value} for token, value in told))
        assert event.prompt_logprobs == (expected if is_first else None)
        if event.output is not None:
            assert event.output.prompt_logprobs == expected

    def _check_whole(self, output, told, expected, cursed) -> None:
        assert list(output.token_ids) == told
        if cursed:
            assert output.finish_reason == "error" and output.error.startswith("Fault: ")
        else:
            assert output.error is None and told == expected
            stopped = told and told[-1] == EOS and not self.ignore_eos
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
        self.told: list[list[int]] = []

    @rule(
        requests=st.lists(st.tuples(PROMPTS, BUDGETS, SCORES), min_size=1, max_size=4),
        ignore_eos=st.booleans(),
    )
    def come(self, requests, ignore_eos):
        prompts, budgets, scored = zip(*requests)
        prompts = [prompt[: 47 - budget] for prompt, budget in zip(prompts, budgets)]
        budgets = [b if b or asked is not None else 1 for b, asked in zip(budgets, scored)]
        self.consumers.append(Consumer(self.engine, prompts, budgets, ignore_eos, scored))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), rest=st.lists(TOKENS, max_size=5), budget=st.integers(1, 20))
    def come_back(self, data, rest, budget):
        """The next turn of a conversation: a prompt that begins with an earlier one's output."""
        text = data.draw(st.sampled_from(self.told))
        prompt = [*text, *rest][: 47 - budget]
        self.consumers.append(Consumer(self.engine, [prompt], [budget], True))

    @rule()
    def forget(self):
        self.engine.reset_prefix_cache()

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
            self.told += [[*p, *t] for p, t in zip(consumer.prompts, consumer.tokens)]
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
        """Every row that no live request has committed, and that the index does not have, may hold
        anything."""
        state = self.device.state
        if state.deleted:
            return
        live = {
            state.cell(request.slot, at)
            for request in self.loop.ledger.running.values()
            for at in range(state.lengths[request.slot])
        }
        findable = findable_pages(self.loop.ledger.book)
        for cell in itertools.product(*map(range, state.cells.shape)):
            if cell not in live and cell[0] not in findable:
                state.cells[cell] = state.context[cell] = POISON

    @invariant()
    def every_page_is_free_or_held_by_the_living(self):
        book = self.loop.ledger.book
        check_book(book, self.loop.plan.num_pages)
        assert set(book.held) == set(self.loop.ledger.running)
        assert self.engine.free_pages + len(book.holders) == self.engine.total_pages
        if self.loop.trusted and not self.device.state.deleted:
            check_contents(book, self.device.state.cells, self.device.state.context)

    @invariant()
    def slots_are_held_once(self):
        slots = [request.slot for request in self.loop.ledger.running.values()]
        assert len(set(slots)) == len(slots)

    @invariant()
    def who_waits_is_passed_by_no_more_pages_than_it_needs_and_one_request_more(self):
        plan, waiting = self.loop.plan, self.loop.ledger.waiting
        assert [r.id for r in waiting] == sorted(r.id for r in waiting)
        for request in waiting:
            needed = self.loop.ledger.book.pages_for(plan.positions_of(request.length_limit))
            assert request.passed_pages < needed + plan.max_pages
            if not request.passed_pages:
                free = (
                    entry for id, entry in self.loop.ledger.book.held.items() if id > request.id
                )
                shared = self.loop.ledger.book.holders
                assert all(shared[page] > 1 for pages in free for page in pages)

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
    limits = settings(max_examples=80, stateful_step_count=25, deadline=None)
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
