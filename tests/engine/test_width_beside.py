"""The width of a step that also reads a chunk of a prompt, so that it hardly takes longer."""

import pytest

from jaxspec.engine.adapt.width import LONGEST_BESIDE, AdaptiveWidth, cost_of_tokens

SECONDS = {1: 5.0, 4: 7.0, 8: 9.0, 16: 17.0}
"""A step of 32 requests, by its width; from width 8 on it takes 1/32 longer per token."""
COSTS = {(32, width): seconds for width, seconds in SECONDS.items()}
WIDTHS = 4, 8, 16
"""Those of steps that also read a prompt."""


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
    assert AdaptiveWidth(COSTS).width_beside(32, width, prompt, WIDTHS) == chosen
    longer = cost_of_tokens(32, 32 * chosen + prompt, COSTS) / SECONDS[width]
    assert longer <= LONGEST_BESIDE or chosen == 4


def test_it_is_one_of_the_widths_that_there_are():
    assert AdaptiveWidth(COSTS).width_beside(32, 8, 128, (16,)) == 16


def test_it_is_not_wider_than_without_a_prompt():
    flat = {(32, width): 1.0 for width in SECONDS}
    assert AdaptiveWidth(flat).width_beside(32, 8, 128, WIDTHS) == 8


def test_a_cost_that_the_loop_corrected_does_not_change_the_choice():
    """Only the chosen width's own cost is corrected, so by these costs its steps could take longer
    beside a prompt than they may."""
    adaptive = AdaptiveWidth(COSTS)
    for _ in range(100):
        adaptive.of_loop.timed((32, 8), 1.3 * SECONDS[8])
    assert adaptive.costs[32, 8] > 1.25 * SECONDS[8]
    assert adaptive.width_beside(32, 8, 96, WIDTHS) == 4
