"""A whole speculative step of Qwen3-8B, and of Qwen3.5-4B, compiled for an H100 without one."""

import dataclasses
import pathlib
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import assert_no_pool_copies, assert_no_spills, compiled, needs_compiler, placed

from jaxspec.cache.states import States
from jaxspec.checkpoint.fp8_names import quantised_drafter
from jaxspec.engine.adapt.drafted import drafted_width
from jaxspec.engine.setup.copied_head import copying_head
from jaxspec.engine.setup.memory import bytes_until_commit, temporary_bytes
from jaxspec.engine.step.compiled import JITTED
from jaxspec.engine.step.io import Drafting, Models
from jaxspec.engine.step.mixed import mixed_step
from jaxspec.engine.step.state import empty_state
from jaxspec.engine.step.steps import copy_step, decode_step
from jaxspec.engine.step.upload import prompt_chunk
from jaxspec.models.copied_head import outputs_at_once, with_outputs
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import num_bytes, random_params
from jaxspec.models.presets import dflash_for, published
from jaxspec.models.targets import target_of
from jaxspec.proposers.dflash import DFlashProposer
from pallas_kernels.dispatch import Implementation

PAGES_PER_SLOT, PAGE_SIZE = 17, 64


def lowered_step(
    name: str,
    slots: int,
    num_tokens: int | None = None,
    plain: bool = False,
    beside: int = 0,
    draws: bool = False,
    fp8_drafter: bool = False,
    fp8_activations: bool = False,
    kernels: Implementation = "mosaic",
) -> tuple[jax.stages.Lowered, Any, Any]:
    """The step, and the shapes of parameters and state. A plain one has no drafts. Also one that
    reads so many tokens of a prompt `beside` its requests, or one that draws, or one whose drafter
    is in FP8, or one whose target rounds activations to 8 bits."""
    pages = slots * PAGES_PER_SLOT + 1
    target = published(name)
    draft = dflash_for(target)
    if fp8_activations:
        rounding = target.decoder.with_quantised_inputs()
        target = dataclasses.replace(target, decoder=rounding)
    if fp8_drafter:
        draft = copying_head(quantised_drafter(draft, "the drafter"), devices=1)
    model = target_of(target, draft.target_layer_ids, jnp.bfloat16).with_kernels(kernels)
    drafter = DFlash(draft, jnp.bfloat16, kernels)
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
    chunks = [jax.eval_shape(partial(prompt_chunk, [], 1, beside, 0))] if beside else []
    width = draft.block_size
    if num_tokens is not None:
        width = drafted_width(num_tokens // slots, width)
    lowered = JITTED[mixed_step if beside else decode_step].lower(
        models,
        placed(params),
        placed(state),
        integers,
        integers,
        *placed(chunks),
        drafting=None if plain else Drafting(0, width, draws, num_tokens),
        draws=draws,
    )
    return lowered, params, state


@needs_compiler
@pytest.mark.slow
def test_a_step_of_portable_kernels_compiles_in_place_without_spills(monkeypatch, capfd):
    """A layer writes, attends and adds up twice; the drafter's also write what they get to read."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lowered, _, state = lowered_step("qwen3-8b", slots=1, kernels="portable")
    assert "dense_chain" not in lowered.as_text()
    program = compiled(lowered)
    assert_no_spills("".join(capfd.readouterr()))
    of_target, of_drafter = 36, 5
    kernels = program.as_text().count('custom_call_target="mosaic_gpu')
    assert kernels == 4 * (of_target + of_drafter) + of_drafter
    for shape in {cache.shape for cache in jax.tree.leaves((state.cache, state.proposers))}:
        assert_no_pool_copies(program, shape)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slots", "num_tokens"),
    [
        ("qwen3-8b", 1, None),
        ("qwen3-8b", 4, None),
        ("qwen3-8b", 8, None),
        ("qwen3-8b", 24, None),
        ("qwen3-8b", 8, 64),
        ("qwen3-8b", 32, 256),
        ("qwen3-8b-fp8", 4, None),
        ("qwen3-8b-fp8", 8, None),
        ("qwen3.5-4b", 1, None),
        ("qwen3.5-4b", 8, None),
    ],
)
def test_the_step_is_one_command_buffer_in_place(
    name, slots, num_tokens, monkeypatch, capfd, tmp_path: pathlib.Path
):
    """Up to 64 tokens a layer is one kernel from attention to attention, with more it is many."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lowered, params, state = lowered_step(name, slots, num_tokens)
    of_drafter = slots * 16 <= 64
    assert ("dense_chain" in lowered.as_text()) == (of_drafter or num_tokens == 64)
    program = compiled(lowered, xla_dump_to=str(tmp_path))

    assert_no_spills("".join(capfd.readouterr()))
    caches = jax.tree.leaves((state.cache, state.proposers))
    for shape in {cache.shape for cache in caches}:
        assert_no_pool_copies(program, shape)
    aliased = program.memory_analysis().alias_size_in_bytes
    assert 0 <= aliased - num_bytes(caches) < 10_000  # the rest of the state is small
    target = target_of(published(name), (), jnp.bfloat16)
    rows, kept = 16 * slots, bytes_until_commit(target, slots, 16)
    planned = temporary_bytes(params, target.vocab_size, rows, rows, draws=False, kept=kept)
    assert program.memory_analysis().temp_size_in_bytes <= planned
    # A hybrid's 24 recurrent layers each keep 45 kB per token until the commit: 18 MB. Logits of
    # 248320 tokens are 16 MB in float32.
    per_slot = 45e6 if name.startswith("qwen3.5") else 15e6
    assert planned < slots * per_slot or name.endswith("fp8")  # planned for XLA's products

    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    top_level = re.findall(r"^\d+: (\w+)", thunks.read_text(), re.MULTILINE)
    assert top_level == ["kCommandBuffer"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "attention_rounds"), [(1, False), (4, True), (16, True)])
def test_attention_rounds_what_the_next_product_reads_in_8_bits(slots, attention_rounds):
    """With few tokens that product is the chain's, with more it is one of its own. With one
    request eight splits share the context, and the chain rounds the rows."""
    lowered, _, _ = lowered_step("qwen3-8b-fp8", slots, fp8_activations=True)
    program = compiled(lowered).as_text()
    calls = re.findall(r"= (\S+ .*)custom-call\(.*op_name=\"jit\(decode_step\)/(\S+)\"", program)
    verified = [(made, name) for made, name in calls if name.startswith("verify/Qwen3")]
    attended = [made for made, name in verified if "/paged_attention/" in name]
    assert ["f8e4m3fn" in made for made in attended] == [attention_rounds] * 36
    assert any("/dense_chain/" in name for _, name in verified) == (slots <= 4)
    alone = [name for _, name in verified if "/round_rows/" in name]
    assert [name.split("/")[2:4] for name in alone] == [["layer_0", "qkv"]]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("slots", [4, 8, 9])
def test_a_drafter_in_fp8_runs_on_the_kernels_for_8_bit_matrices(
    slots, monkeypatch, capfd, tmp_path: pathlib.Path
):
    """Beside a target in 16 bits, and without copying the keys' and values' part of a matrix. With
    up to 128 drafts it reads its copy of the head."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lowered, params, state = lowered_step("qwen3-8b", slots, fp8_drafter=True)
    program = compiled(lowered, xla_dump_to=str(tmp_path))
    assert_no_spills("".join(capfd.readouterr()))
    for shape in {cache.shape for cache in jax.tree.leaves(state.proposers)}:
        assert_no_pool_copies(program, shape)
    rows, vocab = 16 * slots, published("qwen3-8b").vocab_size
    planned = temporary_bytes(params, vocab, rows, rows, draws=False)
    assert program.memory_analysis().temp_size_in_bytes <= planned

    operands, name = (
        r"operand_layout_constraints=\{(.*?\})\}",
        r'op_name="jit\(decode_step\)/(\S+)"',
    )
    calls = re.findall(rf"custom-call\(.*{operands}.*{name}", program.as_text())

    def in_8_bits(part: str, op: str) -> list[bool]:
        """For every call of this op in this part of the step, whether it reads an 8-bit matrix."""
        return [
            "f8e4m3fn" in arrays
            for arrays, name in calls
            if name.startswith(part) and f"/{op}/" in name
        ]

    if slots * 16 <= 64:
        assert in_8_bits("draft/dflash", "dense_chain") == [True] * 5
        assert in_8_bits("verify/Qwen3", "dense_chain") == [False] * 36
        outside_chains = 1  # the first projection
    else:
        outside_chains = 5 * 4
    copied_head = int(slots * 15 <= 128)
    assert in_8_bits("draft/dflash", "fp8_product") == [True] * (outside_chains + copied_head)
    heads = re.findall(rf"dot_general.*-> tensor<(\S+)x{vocab}x", lowered.as_text())
    assert sorted(heads) == sorted([f"{slots}x16"] + [f"{slots}x15"] * (1 - copied_head))
    assert in_8_bits("commit/context/dflash", "fp8_product") == [True] * 5
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < 20e6 * slots, "what a step with a drafter in 16 bits takes, and logits"
    copied = re.findall(r"= f8e4m3fn\S* copy\S*\(|= f8e4m3fn\S* fusion\(", program.as_text())
    assert not copied

    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    top_level = re.findall(r"^\d+: (\w+)", thunks.read_text(), re.MULTILINE)
    assert top_level == ["kCommandBuffer"]


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "outputs_axis"), [((4096, 151936), 1), ((151936, 2560), 0)], ids=["8B", "4B"]
)
def test_a_head_is_copied_in_place_in_parts(shape, outputs_axis):
    """Of a head of 1.2 GB, 67 MB at most are in memory once more, transposed."""
    inputs, outputs = shape[1 - outputs_axis], shape[outputs_axis]
    array = jax.ShapeDtypeStruct
    copy = {
        "weight": array((outputs, inputs), jnp.float8_e4m3fn),
        "scales": array((outputs // 128, inputs // 128), jnp.float32),
    }
    given = placed((copy, array(shape, jnp.bfloat16), array((), jnp.int32)))
    size = outputs_at_once(outputs, inputs)
    assert size < outputs / 10 and size % 128 == 0
    memory = compiled(with_outputs.lower(*given, size, outputs_axis)).memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(copy)
    assert memory.temp_size_in_bytes <= 2 * size * inputs


@needs_compiler
@pytest.mark.slow
def test_a_step_that_draws_is_one_command_buffer(tmp_path: pathlib.Path):
    """With branches for filters that need the largest logits, or all of them sorted."""
    lowered, params, _ = lowered_step("qwen3-8b", 1, draws=True)
    program = compiled(lowered, xla_dump_to=str(tmp_path))
    planned = temporary_bytes(params, published("qwen3-8b").vocab_size, 16, 16, draws=True)
    assert program.memory_analysis().temp_size_in_bytes <= planned
    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    listed = thunks.read_text()
    assert re.findall(r"^\d+: (\w+)", listed, re.MULTILINE) == ["kCommandBuffer"]
    assert len(re.findall("kConditional", listed)) == 5


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "num_tokens", "drafts"), [(8, None, 15), (32, 256, 11)])
def test_a_step_that_reads_a_prompt_too_is_one_command_buffer_in_place(
    slots, num_tokens, drafts, monkeypatch, capfd, tmp_path: pathlib.Path
):
    """The target's head is multiplied once, the drafter's only by as many places as are drafted,
    and the temporaries are no larger than planned."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    beside, block = 128, 16
    lowered, params, state = lowered_step("qwen3-8b", slots, num_tokens, beside=beside)
    vocab = published("qwen3-8b").vocab_size
    heads = re.findall(rf"dot_general.*-> tensor<(\S+)x{vocab}x", lowered.as_text())
    verified = num_tokens or slots * block
    assert sorted(heads) == sorted([f"{verified + 1}x1", f"{slots}x{drafts}"])
    program = compiled(lowered, xla_dump_to=str(tmp_path))
    assert_no_spills("".join(capfd.readouterr()))
    caches = jax.tree.leaves((state.cache, state.proposers))
    for shape in {cache.shape for cache in caches}:
        assert_no_pool_copies(program, shape)
    rows = slots * block
    planned = temporary_bytes(params, vocab, rows + beside, rows + 1, draws=False)
    assert program.memory_analysis().temp_size_in_bytes <= planned
    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    top_level = re.findall(r"^\d+: (\w+)", thunks.read_text(), re.MULTILINE)
    assert top_level == ["kCommandBuffer"]


@needs_compiler
@pytest.mark.slow
def test_a_plain_step_reads_its_states_before_it_writes_them():
    """It keeps all that it reads, so nothing but a barrier makes the compiler wait with that. The
    other order would cost two copies of every state."""
    lowered, _, state = lowered_step("qwen3.5-4b", 8, plain=True)
    program = compiled(lowered)
    for shape in {cache.shape for cache in jax.tree.leaves(state.cache)}:
        assert_no_pool_copies(program, shape)


@needs_compiler
def test_a_saved_state_is_copied_in_place():
    """Of 2.6 GB of state, with 32 saved ones, one row moves."""
    target = published("qwen3.5-4b")
    model = target_of(target, dflash_for(target).target_layer_ids, jnp.bfloat16)
    models = Models(model, (), PAGE_SIZE)
    positions = PAGES_PER_SLOT * PAGE_SIZE
    state = jax.eval_shape(
        lambda: empty_state(models, 8, 137, PAGES_PER_SLOT, positions, num_snapshots=32)
    )
    row = placed(jax.ShapeDtypeStruct((), jnp.int32))
    program = compiled(JITTED[copy_step].lower(models, {}, placed(state), row, row))
    one = next(layer for layer in state.cache.layers if isinstance(layer, States))
    assert one.matrices.shape[0] == 8 + 1 + 32
    for rows in (one.matrices, one.tails):
        assert_no_pool_copies(program, rows.shape)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(state)
    assert memory.temp_size_in_bytes < 4e6, "one layer's matrices of one slot are 2.1 MB"
