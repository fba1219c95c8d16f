"""DSpark drafters and their twin without a Markov head draft what the reference drafts."""

import pytest
from dspark_pairs import (
    WHOLE,
    check_recorded,
    choosing_among,
    config_of,
    engine_over,
    recorded,
)
from golden_pair import ALL_SIZES, budget, opened

ONE_AND_THREE = {"batch_sizes": (1, 3), "prefill_shapes": ((1, 32), (3, 32))}
RUNS = [
    ("anchor_first", 0.0, "overlapped"),
    ("dspark", 0.0, "overlapped"),
    ("dspark", 0.5, "overlapped"),
    ("dspark", 0.5, "lockstep"),
]
"""The drafter, the least confidence, and the driver. Another test runs the twin in lockstep."""


def prompts_of(which: str, threshold: float = 0.0) -> list[list[int]]:
    return [case["prompt"] for case in recorded(which, threshold)]


def check_all(outputs: list, which: str, threshold: float) -> None:
    for output, case in zip(outputs, recorded(which, threshold), strict=True):
        check_recorded(output, case)


def test_what_the_files_say():
    twin, dspark = config_of("anchor_first"), config_of("dspark")
    for config in twin, dspark:
        assert config.anchor_first and config.owns_embedding and config.owns_head
        assert (config.rows, config.num_drafts, config.block_size) == (7, 7, 8)
    assert (twin.kind, twin.transition, twin.confidence) == ("dflash", None, None)
    assert (dspark.kind, dspark.transition.kind, dspark.transition.rank) == (
        "dspark",
        "vanilla",
        16,
    )
    assert dspark.confidence.reads_token


@pytest.mark.parametrize(("which", "threshold", "driver"), RUNS)
def test_in_batches(which, threshold, driver):
    engine = engine_over(opened(which), driver=driver, confidence_threshold=threshold)
    assert engine.loop.plan.method == config_of(which).kind
    outputs = engine.generate(prompts_of(which, threshold), budget(WHOLE))
    check_all(outputs, which, threshold)
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize(
    ("which", "threshold", "driver"),
    [("anchor_first", 0.0, "overlapped"), ("dspark", 0.5, "lockstep")],
)
def test_alone(which, threshold, driver):
    """In the programs of batches: those for a single row run in the layouts below."""
    engine = engine_over(opened(which), driver=driver, confidence_threshold=threshold)
    cases = recorded(which, threshold)
    for case in (cases[0], cases[-1]):
        check_recorded(engine.generate(case["prompt"], budget(WHOLE)), case)


def test_in_the_steps_without_drafts_one_token_is_emitted():
    """Every step of the reference, those with an empty proposal among them."""
    engine = engine_over(opened("dspark"), confidence_threshold=0.5)
    case = next(c for c in recorded("dspark", 0.5) if 0 in c["proposal_lengths"])
    events = list(engine.stream(case["prompt"], budget(WHOLE)))
    emitted = [len(event.token_ids) for event in events if event.token_ids]
    assert emitted[1:-1] == case["acceptance_lengths"][: len(emitted) - 2]


def test_sixteen_candidates_are_as_good_as_all():
    """Of sixteen, the drafter of the batches above chooses; here the same drafter of all."""
    assert config_of("dspark").transition.candidates == 16
    engine = engine_over(choosing_among(None))
    check_all(engine.generate(prompts_of("dspark"), budget(WHOLE)), "dspark", 0.0)


def test_fewer_candidates_accept_less():
    """So the comparison above can fail: one candidate is no Markov head at all."""
    cases = recorded("dspark")[:8]
    engine = engine_over(choosing_among(1))
    outputs = engine.generate([case["prompt"] for case in cases], budget(WHOLE))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"]
    drafted = sum(output.stats.num_spec_steps for output in outputs)
    assert drafted > sum(len(case["acceptance_lengths"]) for case in cases)


@pytest.mark.parametrize(
    ("which", "threshold", "options"),
    [
        ("dspark", 0.5, dict(exact=True, prefill_chunk=7, **ALL_SIZES)),
        ("dspark", 0.0, dict(page_size=64, max_batch=3, **ONE_AND_THREE)),
        ("anchor_first", 0.0, dict(exact=True, driver="lockstep", page_size=1)),
    ],
    ids=str,
)
def test_whatever_the_layout(which, threshold, options):
    engine = engine_over(opened(which), confidence_threshold=threshold, **options)
    cases = recorded(which, threshold)[:5]
    outputs = engine.generate([case["prompt"] for case in cases], budget(40))
    for output, case in zip(outputs, cases):
        check_recorded(output, case, 40)
