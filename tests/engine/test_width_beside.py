"""The width of a step that also reads a chunk of a prompt, so that it hardly takes longer."""

import pytest
from fake_device import WIDTH, fake_engine

from jaxspec.engine.adapt.beside import LONGEST_BESIDE, cost_of_tokens
from jaxspec.engine.adapt.even import Width
from jaxspec.engine.adapt.loop_costs import Costs
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.mixed import mixed_step
from jaxspec.engine.step.observer import StepObserver
from jaxspec.engine.step.steps import decode_step, prefill_step

SECONDS: dict[Width, float] = {1: 5.0, 4: 7.0, 8: 9.0, 16: 17.0}
"""A step of 32 requests, by its width; from width 8 on it takes 1/32 longer per token."""
COSTS: Costs = {(32, width): seconds for width, seconds in SECONDS.items()}
WIDTHS = 4, 8, 16
"""Those of steps that also read a prompt."""


def adaptive_with(prompt: int, costs: Costs = COSTS, widths=WIDTHS) -> AdaptiveWidth:
    """Chooses among steps that also read so many tokens of a prompt."""
    estimates = {(32, each): cost_of_tokens(32, 32 * each + prompt, costs) for each in widths}
    return AdaptiveWidth(costs, beside=estimates)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(128, 7.0), (192, 8.0), (256, 9.0), (384, 13.0), (512, 17.0), (640, 21.0), (64, 6.0)],
)
def test_the_cost_is_on_the_line_through_the_nearest_steps(tokens, seconds):
    assert cost_of_tokens(32, tokens, COSTS) == pytest.approx(seconds)


def test_of_one_step_with_drafts_there_is_no_line():
    assert cost_of_tokens(4, 100, {(4, 1): 1.0, (4, 8): 2.0, (8, 8): 3.0}) == 2.0


@pytest.mark.parametrize(
    ("width", "prompt", "chosen"),
    [
        (16, 128, 8),  # 8 x 32 + 128 tokens take 13 of 17 seconds, 16 x 32 + 128 would take 21
        (16, 64, 16),  # 19 seconds are within the bound
        (8, 128, 4),  # as many tokens as without the prompt
        (8, 32, 8),  # 10 of 9 seconds are within the bound
        (4, 128, 4),  # 9 instead of 7 seconds, but there is nothing narrower
    ],
)
def test_a_prompt_replaces_drafts(width, prompt, chosen):
    assert adaptive_with(prompt).width_beside(32, width) == chosen
    longer = cost_of_tokens(32, 32 * chosen + prompt, COSTS) / SECONDS[width]
    assert longer <= LONGEST_BESIDE or chosen == 4


def test_it_is_one_of_the_widths_that_there_are():
    assert adaptive_with(128, widths=(16,)).width_beside(32, 8) == 16


def test_it_is_not_wider_than_without_a_prompt():
    flat: Costs = {(32, width): 1.0 for width in SECONDS}
    assert adaptive_with(128, flat).width_beside(32, 8) == 8


def test_a_step_that_takes_longer_than_was_estimated_is_soon_chosen_seldom():
    """Estimates that are just within the bound, of steps that take 1.28 times as long as others."""
    adaptive = adaptive_with(42)
    clock, chosen = 0.0, []
    for _ in range(400):
        clock += 1.07 * SECONDS[8]
        adaptive.note_time((32, 8), clock - 1, clock, True)
        chosen.append(width := adaptive.width_beside(32, 8))
        clock += (1.28 if width == 8 else 1.1) * 1.07 * SECONDS[8]
        adaptive.note_time((32, width), clock - 1, clock, True, reads_prompt=True)
    assert chosen[0] == 8
    assert chosen[20:].count(8) < 0.05 * len(chosen[20:])
    assert adaptive.costs[32, 8] == pytest.approx(1.07 * SECONDS[8], rel=0.01), "those without"


def test_a_step_that_is_shorter_than_was_estimated_stays():
    adaptive, clock = adaptive_with(42), 0.0
    for _ in range(100):
        clock += SECONDS[8]
        adaptive.note_time((32, 8), clock - 1, clock, True)
        assert adaptive.width_beside(32, 8) == 8
        clock += 1.1 * SECONDS[8]
        adaptive.note_time((32, 8), clock - 1, clock, True, reads_prompt=True)


class Ran(StepObserver):
    """The programs that decode or read prompts."""

    def __init__(self) -> None:
        self.seen = []

    def program(self, step, inputs, static) -> None:
        if step in (decode_step, mixed_step, prefill_step):
            self.seen.append(step)


def test_every_program_is_timed_once(monkeypatch):
    """A step that also reads a prompt has two results. The host waits for the first of them."""
    noted, note, ran = [], AdaptiveWidth.note_time, Ran()

    def noting(self, size, asked, came, another, reads_prompt):
        noted.append((size, another, reads_prompt))
        note(self, size, asked, came, another, reads_prompt)

    monkeypatch.setattr(AdaptiveWidth, "note_time", noting)
    engine = fake_engine(adaptive=True, beside=WIDTH, num_slots=4)
    live = {engine.submit([1, 2, 3], SamplingParams(max_tokens=30))}
    with engine.observe(ran):
        for begin in range(100):
            if begin == 4:
                live.add(engine.submit([4] * 12, SamplingParams(max_tokens=9)))
            live -= {event.index for event in engine.step(live) if event.output is not None}
            if not live:
                break
    assert not live and ran.seen.count(mixed_step) > 1
    assert len(ran.seen) - len(noted) in (0, 1), "the last one may be of requests that had ended"
    for step, (size, _, reads_prompt) in zip(ran.seen, noted):
        assert (size is None) == (step is prefill_step)
        assert reads_prompt == (step is not decode_step)
    assert any(another for _, another, _ in noted)
    engine.generate([[5, 6]], SamplingParams(max_tokens=2))
    assert noted[-1][1] is False, "no step follows the last token"
