"""A fixed width: fewer drafts are verified than the drafter makes, and no token changes."""

import pytest
from golden_pair import budget, golden_engine, trajectories

from jaxspec.errors import UsageError


def test_a_fixed_width_verifies_only_the_first_drafts():
    engine, case = golden_engine(width=3), trajectories()[2]
    output = engine.generate(case["prompt"], budget(40))
    assert list(output.token_ids) == case["dflash_tokens"][:40]
    assert max(output.stats.acceptance_lengths) == 3 < max(case["acceptance_lengths"])
    assert output.stats.acceptance_lengths[0] == min(3, case["acceptance_lengths"][0])
    assert output.stats.num_draft_tokens <= 2 * output.stats.num_spec_steps


@pytest.mark.parametrize("width", [1, 99])
def test_widths_that_no_step_can_have(width):
    with pytest.raises(UsageError, match=f"width is {width}; expected 2 to"):
        golden_engine(width=width)
