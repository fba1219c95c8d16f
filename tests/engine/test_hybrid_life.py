"""Any life of an engine with a Qwen3.5: requests come, stream, are left and read again, while each
step accepts another number of drafts and states that nobody may read hold NaN."""

import functools

from first_right import NAME, FirstRight
from golden_pair import budget
from hybrid_pair import VOCAB, hybrid_engine
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.random import default_rng
from spoilt_states import Poisoner
from sweeping import check_nothing_is_leaked

from jaxspec.proposers.methods import METHODS, Method

SIZES = (1, 2, 9, 15, 16, 33, 40)
PROMPTS = [
    default_rng(seed).integers(0, VOCAB - 1, size).tolist() for seed, size in enumerate(SIZES)
]
LONGEST = 40
SHORT_LIVES, LONG_LIVES = (4, 4), (30, 12)
"""Rules in a life, and lives. A failure is told as it was found: to look for a smaller one takes
minutes, and most faults show in the short ones, which come first."""


@functools.cache
def expected() -> dict[tuple[int, ...], tuple[int, ...]]:
    """What plain decoding says, of which a smaller budget gives the beginning."""
    outputs = hybrid_engine("none").generate(PROMPTS, budget(LONGEST))
    return {tuple(output.prompt_token_ids): output.token_ids for output in outputs}


class Varied(FirstRight):
    """Right drafts: none to all four, another number at each length of a text."""

    def propose(self, request, room):
        self.right = 7 * len(self.tokens[request]) % 5
        return super().propose(request, room)


class Life(RuleBasedStateMachine):
    @initialize(
        driver=st.sampled_from(["lockstep", "overlapped"]), method=st.sampled_from([NAME, "dflash"])
    )
    def begin(self, driver, method):
        self.engine = hybrid_engine(method, driver=driver)
        self.poisoner = Poisoner(self.engine)
        self.streams: list[tuple[list[int], list[int], int, object]] = []

    @rule(which=st.integers(0, len(PROMPTS) - 1), tokens=st.integers(1, LONGEST))
    def come(self, which, tokens):
        events = self.engine.stream(PROMPTS[which], budget(tokens))
        self.streams.append((PROMPTS[which], [], tokens, events))

    @rule(times=st.integers(1, 4), spoil=st.booleans())
    def step(self, times, spoil):
        for _ in range(times):
            if spoil:
                self.poisoner.step_begins(())
            self.engine.loop.step()

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), times=st.integers(1, 4))
    def take(self, data, times):
        stream = data.draw(st.sampled_from(self.streams))
        if not all(self.take_one(stream) for _ in range(times)):
            self.streams.remove(stream)

    def take_one(self, stream) -> bool:
        """Checks the next event; False if there is none."""
        prompt, told, tokens, events = stream
        event = next(events, None)
        if event is None:
            assert len(told) == tokens
            return False
        assert event.output is None or event.output.error is None
        told.extend(event.token_ids)
        assert tuple(told) == expected()[tuple(prompt)][: len(told)]
        return True

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def leave(self, data):
        stream = data.draw(st.sampled_from(self.streams))
        stream[3].close()
        self.streams.remove(stream)

    @rule()
    def distrust(self):
        """As after a fault: all texts are read again."""
        self.engine.loop.trusted = False

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for stream in self.streams:
            while self.take_one(stream):
                pass
        check_nothing_is_leaked(self.engine)


def test_any_life_gives_the_tokens_of_plain_decoding(monkeypatch):
    method = Method(host=lambda options: Varied(expected(), 0, VOCAB))
    monkeypatch.setitem(METHODS, NAME, method)
    for steps, times in SHORT_LIVES, LONG_LIVES:
        lives = settings(
            max_examples=times,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
        )
        run_state_machine_as_test(Life, settings=lives)
