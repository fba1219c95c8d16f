"""A sampled token's key depends on the seed and on its position, and on nothing else: neither on
where the prompt ended, nor on which program drew it, nor on what failed meanwhile."""

import pytest
from golden_pair import budget, golden_engine, trajectories

TOKENS = 14
INDEPENDENT = [{"method": "none"}, {"draft_sampling": "likeliest"}]
"""Engines whose sampled tokens are drawn from the target alone."""


def drawn(max_tokens: int, seed: int):
    return budget(max_tokens, temperature=1.2, top_p=0.95, seed=seed)


@pytest.mark.parametrize("options", INDEPENDENT, ids=str)
def test_a_prompt_may_end_anywhere_in_the_text(options):
    """The tokens that decode steps drew are drawn again by the prefill of a longer prompt, and the
    other way round."""
    prompt = trajectories()[2]["prompt"]
    engine = golden_engine(**options)
    whole = list(engine.generate(prompt, drawn(TOKENS, seed=11)).token_ids)
    read = [1, 2, 5, 9]
    outputs = engine.generate(
        [[*prompt, *whole[:count]] for count in read],
        [drawn(TOKENS - count, seed=11) for count in read],
    )
    assert [whole[:n] + list(o.token_ids) for n, o in zip(read, outputs)] == [whole] * len(read)
    assert len(set(whole)) > TOKENS // 2, "the tokens differ, so that keys matter"


@pytest.mark.parametrize("options", INDEPENDENT, ids=str)
def test_a_sampled_request_that_is_read_again_says_the_same(options):
    prompts = [case["prompt"] for case in trajectories()[1:4]]
    params = [drawn(TOKENS, seed) for seed in (3, 4, 5)]
    undisturbed = [o.token_ids for o in golden_engine(**options).generate(prompts, params)]
    engine = golden_engine(**options)
    stream, outputs = engine.stream(prompts, params), {}
    for number, event in enumerate(stream):
        if number in (4, 9):
            engine.loop.state_lost = True
        if event.output is not None:
            outputs[event.index] = event.output
    assert [outputs[index].token_ids for index in range(3)] == undisturbed
    assert [outputs[index].error for index in range(3)] == [None] * 3
