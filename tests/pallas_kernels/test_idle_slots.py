"""Requests that only fill a batch up, after the others: they cost nothing and change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import write_cases
from attention_cases import Case, inputs
from interpreter import no_races

from pallas_kernels import paged_attention, qkv_write
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.api import filled_attention
from pallas_kernels.paged_attention.blocks import BlockSizes
from pallas_kernels.qkv_write import mosaic as writing

IDLE = 3
CASE = Case((62, 126), width=4)


def attend(implementation: str, **options) -> jax.Array:
    op = filled_attention if options else paged_attention
    call = functools.partial(op, causal=True, implementation=implementation, **options)
    return jax.jit(call)(*inputs(CASE).arguments())


def interpreted(**options) -> jax.Array:
    with no_races() as interpret:
        return jax.block_until_ready(
            mosaic.paged_attention(
                *inputs(CASE).arguments(),
                causal=True,
                window=None,
                sizes=BlockSizes(64, 2, 1, 1),
                interpret=interpret,
                **options,
            )
        )


def same_behind_idle_slots(attend) -> None:
    wanted = attend()
    found = attend(filled_batch=2 + IDLE)
    assert found.shape == (2 + IDLE, *wanted.shape[1:])
    np.testing.assert_array_equal(found[:2], wanted)


@pytest.mark.parametrize("attend", [functools.partial(attend, "xla"), interpreted])
def test_attention_leaves_more_slots_alone(attend):
    same_behind_idle_slots(attend)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "portable"])
def test_attention_leaves_more_slots_alone_on_device(implementation):
    same_behind_idle_slots(functools.partial(attend, implementation))


def write(given: dict, implementation: str):
    call = functools.partial(qkv_write, eps=write_cases.EPS, implementation=implementation)
    return jax.jit(call)(**given)


def write_interpreted(given: dict):
    with no_races() as interpret:
        return jax.block_until_ready(
            writing.qkv_write(**given, eps=write_cases.EPS, interpret=interpret)
        )


def writes_the_same(write) -> None:
    given = write_cases.inputs(write_cases.Case())
    idle = jnp.full((given["qkv"].shape[0], IDLE, *given["qkv"].shape[2:]), jnp.nan)
    more = jnp.concatenate([given["qkv"], idle.astype(given["qkv"].dtype)], axis=1)
    for found, wanted in zip(write(given | {"qkv": more}), write(given), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "write", [functools.partial(write, implementation="xla"), write_interpreted]
)
def test_writing_leaves_more_slots_alone(write):
    writes_the_same(write)


@pytest.mark.gpu
def test_writing_leaves_more_slots_alone_on_device():
    writes_the_same(functools.partial(write, implementation="mosaic"))
