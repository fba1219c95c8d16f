"""On two devices every golden pair says what its reference said, with the same acceptance lengths.

The pairs have two heads of keys and values, so two is all that divides.
"""

import jax
import pytest
from golden_pair import GOLDENS, budget, check_golden, golden_engine, trajectories
from mixed_runs import mixed_engine, staggered

DRAFTERS = ["a", "as", "anchor_first", "dflash2", "dflash2_speculators", "dspark", "eagle3"]
IN_8_BITS = "fp8-block"
"""In `test_sharded_fp8.py`."""
BUDGETS = [48, 5, 29, 1, 40]


def test_there_are_four_devices():
    assert jax.local_device_count() == 4


def test_no_golden_pair_is_left_out():
    folders = {path.parent.name for path in GOLDENS.glob("*/draft")}
    assert folders == {*DRAFTERS, IN_8_BITS}


def golden_run(which: str, **options):
    """The first goldens, with budgets of their own: more of them than slots."""
    engine = golden_engine(which, tensor_parallel_size=2, **options)
    cases = trajectories(which)[: len(BUDGETS)]
    params = [budget(most) for most in BUDGETS[: len(cases)]]
    outputs = engine.generate([case["prompt"] for case in cases], params)
    assert engine.free_pages == engine.total_pages and repr(engine).count("2 x cpu") == 1
    return list(zip(outputs, cases, BUDGETS))


@pytest.mark.parametrize("which", DRAFTERS)
def test_a_drafter_on_two_devices(which):
    for output, case, most in golden_run(which):
        check_golden(output, case, most)


@pytest.mark.parametrize(
    "options",
    [
        dict(method="none", driver="lockstep"),
        dict(method="ngram"),
        dict(method="dflash+ngram", max_ngram=2),
        dict(driver="lockstep"),
    ],
    ids=str,
)
def test_a_method_on_two_devices(options):
    found = golden_run("a", **options)
    assert found
    for output, case, most in found:
        assert list(output.token_ids) == case["greedy"][:most] and output.error is None


def test_the_target_s_own_text_is_what_all_goldens_say():
    """Greedy decoding is compared with a list that no drafter had a part in."""
    case = trajectories()[0]
    assert case["greedy"][:96] == case["dflash_tokens"][:96]


def test_steps_that_read_prompts_beside_requests_that_decode():
    cases, engine = trajectories("a")[1:5], mixed_engine(tokens=12, tensor_parallel_size=2)
    params = [budget(60), budget(30), budget(40, temperature=0.8, seed=3), budget(20)]
    outputs, mixed = staggered(engine, [case["prompt"] for case in cases], params)
    for i in (0, 1, 3):
        check_golden(outputs[i], cases[i], params[i].max_tokens)
    engine.reset_prefix_cache()
    [alone] = engine.generate([cases[2]["prompt"]], [params[2]])
    assert outputs[2].token_ids == alone.token_ids and mixed >= 3
