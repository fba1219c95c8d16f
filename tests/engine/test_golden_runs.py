"""The golden pairs through the engine: tokens and acceptance lengths, whatever the layout."""

import numpy as np
import pytest
from golden_pair import (
    ALL_SIZES,
    budget,
    check_golden,
    golden,
    golden_engine,
    noisy_drafter,
    trajectories,
)

WHOLE = 97
LAYOUTS = {
    "16 slots, pages of 16": dict(
        which="a", max_batch=16, prefill_chunk=64, batch_sizes=(16,), prefill_shapes=((4, 64),)
    ),
    "8 slots, pages of 64, chunks of 7, exact": dict(
        which="as", max_batch=8, page_size=64, prefill_chunk=7, exact=True, **ALL_SIZES
    ),
    "3 slots, pages of 1, chunks of 1, lockstep": dict(
        which="a",
        max_batch=3,
        page_size=1,
        max_model_len=140,
        prefill_chunk=1,
        driver="lockstep",
        batch_sizes=(3,),
        prefill_shapes=((3, 1),),
    ),
    "1 slot, pages of 64, chunks of 64, exact lockstep": dict(
        which="as",
        max_batch=1,
        page_size=64,
        prefill_chunk=64,
        driver="lockstep",
        exact=True,
        **ALL_SIZES,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shuffled_arrivals_with_staggered_budgets(layout):
    """Prompts come in a random order, some while others run, each with a budget of its own."""
    options = dict(LAYOUTS[layout])
    which, slots = options.pop("which"), options["max_batch"]
    engine = golden_engine(which, **options)
    room = engine.max_model_len
    random = np.random.default_rng(slots)
    order = random.permutation(len(trajectories(which)))
    cases = [trajectories(which)[i] for i in order]
    cases = [case for case in cases if len(case["prompt"]) + WHOLE <= room]
    cases = cases if slots == 16 else cases[: slots + 3]
    budgets = [int(b) for b in random.integers(1, WHOLE, len(cases))]
    budgets[0], budgets[-1] = WHOLE, 2
    streams, outputs = [], {}
    begun = 0
    while begun < len(cases) or streams:
        if begun < len(cases) and (not streams or random.random() < 0.3):
            some = range(begun, min(begun + int(random.integers(1, 5)), len(cases)))
            prompts = [cases[i]["prompt"] for i in some]
            streams.append((some, engine.stream(prompts, [budget(budgets[i]) for i in some])))
            begun = some.stop
        some, stream = streams[random.integers(len(streams))]
        event = next(stream, None)
        if event is None:
            streams.remove((some, stream))
        elif event.output is not None:
            outputs[some[event.index]] = event.output
    for i, case in enumerate(cases):
        check_golden(outputs[i], case, budgets[i])
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize("which", ["a", "as"])
def test_the_whole_set(which):
    """Every step of the reference, and so the drafter is alive."""
    engine = golden_engine(which)
    outputs = engine.generate([case["prompt"] for case in trajectories(which)], budget(WHOLE))
    for output, case in zip(outputs, trajectories(which)):
        check_golden(output, case, WHOLE)
        assert list(output.stats.acceptance_lengths) == case["acceptance_lengths"]
    steps = sum(output.stats.num_spec_steps for output in outputs)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert 1 + accepted / steps == pytest.approx(golden(which)["mean_acceptance_length"])
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    assert drafted == 7 * steps


def test_plain_decoding_and_a_drafter_of_noise_say_the_same():
    cases = trajectories()[1:5]
    prompts = [case["prompt"] for case in cases]
    plain = golden_engine(method="none").generate(prompts, budget(40))
    noisy = golden_engine(params=noisy_drafter()).generate(prompts, budget(40))
    for case, by_none, by_noise in zip(cases, plain, noisy):
        assert list(by_none.token_ids) == list(by_noise.token_ids) == case["greedy"][:40]
        assert by_none.stats.num_spec_steps == 0
    dead = np.mean([length for o in noisy for length in o.stats.acceptance_lengths])
    assert 1 <= dead < 1.2


def test_one_prompt_alone():
    case = trajectories()[3]
    output = golden_engine().generate(case["prompt"], budget(30))
    check_golden(output, case, 30)
