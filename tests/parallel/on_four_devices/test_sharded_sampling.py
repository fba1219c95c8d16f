"""Drafts of every drafter are drawn, and kept, alike on one, two and four devices, and no device
gets the logits of the others."""

from collections.abc import Iterator

import pytest
from jax.extend.core import jaxprs_in_params
from wide_models import MIXED, PROMPTS, VOCAB, facts, wide_engine

from jaxspec.engine.setup.warmup import every_program

HOT = [1, 2]
"""The requests that sample."""


def hot(devices: int, kind: str, **options) -> list:
    prompts, params = ([of[i] for i in HOT] for of in (PROMPTS, MIXED))
    return facts(wide_engine(devices, kind, **options).generate(prompts, params))


@pytest.mark.parametrize("kind", ["dflash2", "all tokens", "reduced"])
def test_drawn_drafts_of_every_drafter(kind):
    alone = hot(1, kind)
    assert hot(2, kind) == alone
    assert len({*alone[0][0]}) > 5 and not any(error for _, _, error in alone)


def test_drafts_that_pass_from_program_to_program():
    """Each device keeps its part of the logits that drafts were drawn from."""
    assert hot(4, "dflash", driver="lockstep") == hot(1, "dflash")


@pytest.mark.parametrize("kind", ["all tokens", "eagle3"])
def test_drafts_that_are_drawn_and_scored(kind):
    """Nothing waits for ever, although every place exchanges something, some of it in a branch."""
    both = {"adaptive": True, "driver": "overlapped"}
    found = hot(2, kind, **both)
    assert [len(tokens) for tokens, _, _ in found] == [MIXED[i].max_tokens for i in HOT]
    assert not any(error for _, _, error in found)


def steps_of(jaxpr) -> Iterator:
    for step in jaxpr.eqns:
        yield step
        for inner in jaxprs_in_params(step.params):
            yield from steps_of(inner)


def exchanged_bytes(program) -> set[int]:
    """How many bytes of every token one device sends in each exchange."""
    steps = steps_of(program.traced.jaxpr.jaxpr)
    sent = [s.invars[0].aval for s in steps if s.primitive.name.startswith(("all_gather", "psum"))]
    return {aval.shape[-1] * aval.dtype.itemsize for aval in sent if aval.ndim > 2}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "all tokens", "eagle3"])
def test_nobody_gets_all_logits(kind):
    devices, largest = 2, {}
    engine = wide_engine(devices, kind)
    for program in every_program(engine.loop.device.programs, engine.plan, draws=True, scores=True):
        if sizes := exchanged_bytes(program):
            largest[program.name] = max(sizes)
    assert {"prefill_step", "decode_step"} <= largest.keys()
    of_part = VOCAB // devices * 4
    for name, size in largest.items():
        gets_the_reduced = kind == "eagle3" and name == "decode_step"
        assert (size == of_part // 2) if gets_the_reduced else (64 * 8 <= size < of_part), name
