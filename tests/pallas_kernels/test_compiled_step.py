"""A whole speculative step of Qwen3-8B, compiled for an H100 on a machine without one."""

import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import assert_no_pool_copies, assert_no_spills, compiled, needs_compiler, placed

from jaxspec.engine.setup.memory import temporary_bytes
from jaxspec.engine.step.compiled import JITTED
from jaxspec.engine.step.io import Drafting, Models
from jaxspec.engine.step.state import empty_state
from jaxspec.engine.step.steps import decode_step
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import VOCABULARY, dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.dflash import DFlashProposer

PAGES_PER_SLOT, PAGE_SIZE = 17, 64


def lowered_step(
    slots: int, num_tokens: int | None = None
) -> tuple[jax.stages.Lowered, Any, tuple[int, ...], int]:
    """The step, the parameters' shapes, the shape of one pool, and the number of pools."""
    pages = slots * PAGES_PER_SLOT + 1
    target = qwen3("qwen3-8b")
    draft = dflash_for(target)
    model = Qwen3(target, draft.target_layer_ids, jnp.bfloat16, "mosaic")
    drafter = DFlash(draft, jnp.bfloat16, "mosaic")
    models = Models(model, (DFlashProposer(drafter),), PAGE_SIZE)
    params = jax.eval_shape(
        lambda: {
            "target": random_params(model, jax.random.key(0)),
            "drafter": random_params(drafter, jax.random.key(1)),
        }
    )
    positions = PAGES_PER_SLOT * PAGE_SIZE
    tracked = None if num_tokens is None else draft.num_drafts
    sizes = slots, pages, PAGES_PER_SLOT, positions, tracked
    state = jax.eval_shape(lambda: empty_state(models, *sizes))
    integers = placed(jax.ShapeDtypeStruct((slots,), jnp.int32))
    lowered = JITTED[decode_step].lower(
        models,
        placed(params),
        placed(state),
        integers,
        integers,
        drafting=Drafting(0, draft.block_size, num_tokens=num_tokens),
        draws=False,
    )
    decoder = target.decoder
    layers = decoder.num_layers + draft.decoder.num_layers
    return lowered, params, (pages, PAGE_SIZE, decoder.num_kv_heads, decoder.head_dim), 2 * layers


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "num_tokens"), [(1, None), (4, None), (8, None), (8, 64), (32, 256)]
)
def test_the_step_is_one_command_buffer_in_place(
    slots, num_tokens, monkeypatch, capfd, tmp_path: pathlib.Path
):
    """Up to 64 tokens a layer is one kernel from attention to attention, with more it is many."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lowered, params, pool, pools = lowered_step(slots, num_tokens)
    of_drafter = slots * 16 <= 64
    assert ("dense_chain" in lowered.as_text()) == (of_drafter or num_tokens == 64)
    program = compiled(lowered, xla_dump_to=str(tmp_path))

    assert_no_spills("".join(capfd.readouterr()))
    assert_no_pool_copies(program, pool)
    aliased = program.memory_analysis().alias_size_in_bytes
    assert 0 <= aliased - pools * math.prod(pool) * 2 < 10_000  # the rest of the state is small
    planned = temporary_bytes(params, VOCABULARY, 16 * slots, 16 * slots, draws=False)
    assert program.memory_analysis().temp_size_in_bytes <= planned < slots * 15e6

    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    top_level = re.findall(r"^\d+: (\w+)", thunks.read_text(), re.MULTILINE)
    assert top_level == ["kCommandBuffer"]
