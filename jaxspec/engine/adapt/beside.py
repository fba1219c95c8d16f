"""How many drafts to verify in a step that also reads part of a prompt.

Such a step should hardly take longer than the steps around it, so that the streams of other
requests go on evenly. So the prompt's tokens replace some drafts. What such steps take is estimated
from steps without a prompt, and then follows the loop's own steps (`LoopCosts`), because a prompt
costs more than its share of the products. Steps of the loop take longer than estimates. So a width
that was not tried yet looks a little too cheap and is tried.
"""

import bisect

from jaxspec.engine.adapt.even import Width, tokens_each
from jaxspec.engine.adapt.loop_costs import Costs

LONGEST_BESIDE = 1.15
"""A step that also reads part of a prompt may take this many times as long as one that does not."""


def cost_of_tokens(batch: int, tokens: int, costs: Costs) -> float:
    """Estimates the seconds of a step in which the target reads so many tokens in all, on the line
    through the two nearest of the measured steps with drafts that are not even."""
    of_batch = ((width, cost) for (size, width), cost in costs.items() if size == batch)
    measured = sorted((width * batch, cost) for width, cost in of_batch if isinstance(width, int))
    drafting = measured[1:]  # the first one is of width 1
    if len(drafting) < 2:
        return drafting[-1][1]
    above = bisect.bisect([read for read, _ in drafting], tokens)
    above = min(max(above, 1), len(drafting) - 1)
    (fewer, less), (more, longer) = drafting[above - 1 : above + 1]
    return less + (longer - less) * (tokens - fewer) / (more - fewer)


def choose_width_beside(batch: int, width: Width, costs: Costs, beside: Costs) -> int:
    """The widest width of the steps that read a prompt, whose costs are `beside`, up to the chosen
    `width`, with which the step is short enough. If there is none, the narrowest."""
    longest, widest = LONGEST_BESIDE * costs[batch, width], tokens_each(width)
    seconds = {tokens_each(each): cost for (size, each), cost in beside.items() if size == batch}
    short = [each for each, cost in seconds.items() if each <= widest and cost <= longest]
    return max(short, default=min(seconds))
