"""A Qwen3.5 whose prompts are found in the prefix cache says what it says when it reads them: on
real programs, tokens and acceptance lengths, and with `exact` the bits."""

import jax
import numpy as np
import pytest
from golden_pair import budget, golden_engine
from hybrid_pair import VOCAB, hybrid_engine
from numpy.random import default_rng
from spoilt_states import Distrust, Poisoner

from jaxspec.cache.states import States
from jaxspec.engine.engine import Engine
from jaxspec.engine.schedule import pages
from jaxspec.engine.setup import pools
from jaxspec.errors import LoadError, UsageError

PAGE = 16
TEXT = default_rng(3).integers(0, VOCAB - 1, 110).tolist()
DRIVEN = [
    ("overlapped", "none"),
    ("overlapped", "dflash"),
    ("overlapped", "ngram"),
    ("lockstep", "dflash+ngram"),
]


def beginning(length: int, own: int) -> list[int]:
    """A prompt that shares its first tokens with others."""
    return [*TEXT[:length], *(own * number % (VOCAB - 1) for number in range(1, 9))]


def facts(output) -> tuple:
    assert output.error is None, output.error
    return output.token_ids, output.finish_reason, output.stats.acceptance_lengths


def cached(outputs) -> list[int]:
    return [output.stats.cached_tokens for output in outputs]


@pytest.mark.parametrize(("driver", "method"), DRIVEN)
def test_repeats_shared_beginnings_and_second_turns_in_mixed_batches(driver, method):
    """Each is compared with an engine that finds nothing."""
    engine, cold = (hybrid_engine(method, driver=driver) for _ in range(2))
    poisoner = Poisoner(engine)

    def ask(prompts, params):
        with engine.observe(poisoner):
            outputs = engine.generate(prompts, params)
        cold.reset_prefix_cache()
        expected = cold.generate(prompts, params)
        assert [facts(output) for output in outputs] == [facts(one) for one in expected]
        assert cached(expected) == [0] * len(prompts)
        return outputs

    params = [budget(14), budget(12, temperature=0.8, seed=5), budget(9, speculate=False)]
    first = ask([beginning(40, 3), beginning(70, 5), TEXT[:17]], params)
    assert cached(first) == [0, 0, 0]
    # In other slots. The one in the middle is new, and saves where it parts from a known text.
    repeats = ask([TEXT[:17], beginning(50, 7), beginning(40, 3)], params)
    assert cached(repeats) == [16, 32, 32]
    turns = [[*one.prompt_token_ids, *one.token_ids, 4, 5] for one in first]
    assert cached(ask(turns, params)) == [32, 64, 16]
    assert cached(ask([beginning(51, 9)], params[:1])) == [48]
    assert poisoner.count


@pytest.fixture(scope="module")
def exact():
    return hybrid_engine(exact=True)


@pytest.mark.parametrize("length", [17, 32, 33, 64, 65, 100])
def test_exact_gives_equal_bits(exact, length):
    """A hit begins where every reading of the prompt makes a halt: after chunks of 32."""
    params = budget(8, logprobs=5)
    exact.reset_prefix_cache()
    missed, hit = (exact.generate(TEXT[:length], params) for _ in range(2))
    assert cached([missed, hit]) == [0, (length - 1) // 32 * 32]
    assert facts(hit) == facts(missed) and hit.logprobs == missed.logprobs
    parts = exact.generate([*TEXT[: length - 1], 1], params)
    exact.reset_prefix_cache()
    alone = exact.generate([*TEXT[: length - 1], 1], params)
    assert cached([parts, alone]) == [(length - 1) // 32 * 32, 0]
    assert facts(parts) == facts(alone) and parts.logprobs == alone.logprobs


@pytest.mark.parametrize("snapshots", [1, 2])
def test_few_rows(snapshots):
    engine = hybrid_engine(num_snapshots=snapshots)
    prompts = [beginning(30, own) for own in (3, 5, 7)]
    expected = [facts(engine.generate(prompt, budget(9))) for prompt in prompts]
    for _ in range(2):
        order = *prompts, prompts[0], prompts[0]
        outputs = [engine.generate(prompt, budget(9)) for prompt in order]
        assert [facts(output) for output in outputs] == [*expected, expected[0], expected[0]]
        assert cached(outputs)[-1] == 32
    assert len(engine.loop.ledger.book.index.states.of_texts) == snapshots


@pytest.mark.parametrize("at", [1, 2, 4])
def test_after_a_fault_hits_are_read_again(at):
    engine = hybrid_engine()
    prompts = [beginning(60, own) for own in (3, 3, 7)]
    expected = [facts(output)[0] for output in hybrid_engine().generate(prompts, budget(12))]
    engine.generate(prompts[0], budget(1))

    with engine.observe(Distrust(engine, at)), engine.observe(Poisoner(engine)):
        outputs = engine.generate(prompts, budget(12))
    assert [facts(output)[0] for output in outputs] == expected
    assert cached(outputs)[0] == 64


# What these tests would notice


def test_a_wrong_row_is_noticed(monkeypatch):
    engine = hybrid_engine()
    prompts = [beginning(30, own) for own in (3, 5)]
    missed = [engine.generate(prompt, budget(9)) for prompt in prompts]
    right = pages.saved_row
    swapped = lambda *a: None if (row := right(*a)) is None else 1 - row
    monkeypatch.setattr(pages, "saved_row", swapped)
    hits = [engine.generate(prompt, budget(9)) for prompt in prompts]
    assert cached(hits) == [32, 32]
    assert [facts(hit) for hit in hits] != [facts(one) for one in missed]


def test_saved_rows_hold_the_states_of_their_texts():
    """Those of a slot that has just read so much and no more."""
    engine, fresh = hybrid_engine(), hybrid_engine()
    engine.generate(TEXT[:40], budget(6))
    [saved] = engine.loop.ledger.book.index.states.of_texts.values()
    fresh.generate(TEXT[:32], budget(1))
    row = engine.plan.first_snapshot + saved.row
    for one, other in zip(states_of(engine), states_of(fresh), strict=True):
        slot = np.asarray(other.matrices[0])
        np.testing.assert_allclose(np.asarray(one.matrices[row]), slot, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            np.asarray(one.tails[row]), np.asarray(other.tails[0]), rtol=1e-4, atol=1e-5
        )
        assert np.abs(slot).max() > 0.1


def states_of(engine: Engine) -> list[States]:
    layers = engine.loop.device.state.cache.layers
    found = [layer for layer in layers if isinstance(layer, States)]
    assert found
    return found


# Options and memory


@pytest.mark.parametrize(
    ("options", "why"),
    [({"prefix_caching": False}, "prefix_caching is off"), ({}, "no layers that keep a state")],
)
def test_a_number_of_states_without_effect_is_told(caplog, options, why):
    make = hybrid_engine if options else golden_engine
    make(num_snapshots=3, **options)
    assert f"num_snapshots has no effect: {why}" in caplog.text.replace("the target has ", "")


def test_rows_for_saved_states_are_behind_those_of_the_slots():
    slots = 3 + 1
    for options, rows in [
        ({}, 4 * 3),
        ({"num_snapshots": 5}, 5),
        ({"num_snapshots": 0}, 0),
        ({"prefix_caching": False}, 0),
    ]:
        engine = hybrid_engine(**options)
        assert engine.plan.num_snapshots == rows
        assert {layer.matrices.shape[0] for layer in states_of(engine)} == {slots + rows}
        assert engine.plain().plan.num_snapshots == rows


def test_without_rows_there_is_no_prefix_cache_and_the_log_says_so(caplog):
    caplog.set_level("INFO", "jaxspec")
    engine = hybrid_engine(num_snapshots=0)
    assert "prefix_caching has no effect: num_snapshots is 0" in caplog.text
    outputs = [engine.generate(TEXT[:40], budget(2)) for _ in range(2)]
    assert cached(outputs) == [0, 0] and not engine.plan.prefix_caching


@pytest.mark.parametrize("number", [-1, 2**31])
def test_numbers_that_are_none_are_refused(number):
    with pytest.raises(UsageError, match="num_snapshots is"):
        hybrid_engine(num_snapshots=number)


def test_saved_states_get_an_eighth_of_the_memory_for_caches(monkeypatch):
    def memory_for(pages: float, **options) -> Engine:
        free = int(sizes["slots"] + pages * sizes["page"])
        monkeypatch.setattr(pools.memory, "free_bytes", lambda share, devices: free)
        return hybrid_engine(**options)

    monkeypatch.setattr(pools, "_temporary_bytes", lambda models, params, plan: 0)
    whole = hybrid_engine()
    sizes = sizes_of(whole)
    useful = whole.total_pages
    engine = memory_for(1000)
    assert (engine.plan.num_snapshots, engine.total_pages) == (12, useful)
    room = 16 * sizes["state"] / sizes["page"]
    assert room < useful
    engine = memory_for(room + 0.5)
    assert engine.plan.num_snapshots == 2
    assert engine.total_pages == int(room + 0.5 - 2 * sizes["state"] / sizes["page"])
    given = memory_for(room + 0.5 + 11, num_pages=11)
    assert (given.plan.num_snapshots, given.total_pages) == (2, 11)
    monkeypatch.setattr(pools, "SHARE_OF_SNAPSHOTS", 100)
    engine = memory_for(room)
    assert engine.plan.num_snapshots == 0 and not engine.plan.prefix_caching
    with pytest.raises(LoadError, match="pages of key-value memory fit"):
        memory_for(2)


def sizes_of(engine: Engine) -> dict[str, int]:
    """Bytes of the slots and the trash page, of a page, and of a saved state."""

    def size(slots: int, num_pages: int) -> int:
        shapes = jax.eval_shape(
            lambda: [
                models.target.new_cache(slots, num_pages, PAGE),
                models.proposers[0].new_state(4, num_pages, PAGE, engine.plan.positions),
            ]
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    models = engine.loop.device.models
    state = engine.loop.device.state
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    of_pages = size(4, engine.plan.num_pages) - size(4, 1)
    of_states = size(4 + engine.plan.num_snapshots, 1) - size(4, 1)
    return {
        "slots": total - of_pages - of_states,
        "page": size(4, 2) - size(4, 1),
        "state": size(5, 1) - size(4, 1),
    }
