"""The kernels compiled for an H100 on a machine without one: what ptxas and XLA make of them.

Needs the CUDA plugin and compiler: `pip install -e '.[test,deviceless]'`.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from h100 import (
    assert_no_pool_copies,
    assert_no_spills,
    compiled,
    needs_compiler,
    number_kernels,
    placed,
)

from pallas_kernels.paged_attention import mosaic as attention
from pallas_kernels.paged_attention.blocks import BlockSizes, Shape
from pallas_kernels.paged_attention.plan import make_plan
from pallas_kernels.paged_attention.seen import Mask
from pallas_kernels.qkv_write import mosaic as write
from pallas_kernels.tiles import SHARED_BYTES, THREADS

PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM = 512, 16, 8, 128
BF16 = jnp.bfloat16


def array(shape, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def attention_arguments(
    slots: int,
    width: int,
    group: int = 4,
    head_dim: int = HEAD_DIM,
    kv_heads: int = KV_HEADS,
    page_size: int = PAGE_SIZE,
):
    pool = (PAGES, page_size, kv_heads, head_dim)
    rows = array((slots,), jnp.int32)
    query = array((slots, kv_heads, width, group, head_dim))
    return query, array(pool), array(pool), array((slots, 64), jnp.int32), rows, rows


def write_arguments(
    slots: int,
    width: int,
    group: int = 4,
    head_dim: int = HEAD_DIM,
    kv_heads: int = KV_HEADS,
    scale_dtype=BF16,
):
    fused = (group + 2) * kv_heads * head_dim
    angle = array((slots, width, head_dim // 2), jnp.float32)
    scale = array((head_dim,), scale_dtype)
    pool = array((PAGES, PAGE_SIZE, kv_heads, head_dim))
    rows = array((slots, width), jnp.int32)
    return array((1, slots, width, fused)), scale, scale, angle, angle, rows, pool, pool


def lower(function, arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def compile_for_h100(function, arguments, donate=()):
    return compiled(jax.jit(function, donate_argnums=donate).lower(*placed(arguments)))


def attend(causal: bool, window: int | None = None, window_of_block: bool = False, **sizes):
    chosen = BlockSizes(**sizes) if sizes else None
    mask = dict(causal=causal, window=window, window_of_block=window_of_block)
    return functools.partial(attention.paged_attention, **mask, sizes=chosen)


def norm_rotate_write(*arguments):
    return write.qkv_write(*arguments, eps=1e-6)


LOWERED = [
    (8, 1, True, {}),
    (8, 16, True, {}),
    (8, 16, False, {}),
    (1, 17, False, {}),
    (1, 512, True, {}),
    (1, 16, False, {"splits": 8}),
    (1, 16, True, {"splits": 8}),
]


@pytest.mark.parametrize(("slots", "width", "causal", "sizes"), LOWERED)
def test_attention_lowers(slots: int, width: int, causal: bool, sizes: dict):
    text = lower(attend(causal, **sizes), attention_arguments(slots, width))
    assert text.count("mosaic_gpu") >= 1


@pytest.mark.parametrize(("slots", "width", "group"), [(8, 16, 4), (1, 9, 6), (1, 512, 6)])
def test_attention_with_wide_heads_lowers(slots: int, width: int, group: int):
    text = lower(attend(True), attention_arguments(slots, width, group, 256, 4))
    assert text.count("mosaic_gpu") >= 1


@pytest.mark.parametrize("group", [0, 4, 5])
def test_writing_lowers(group: int):
    assert "mosaic_gpu" in lower(norm_rotate_write, write_arguments(8, 16, group))


@needs_compiler
@pytest.mark.parametrize(
    ("slots", "width", "causal", "sizes"),
    [
        (32, 16, True, {}),
        (8, 16, False, {}),
        (1, 1, True, {"splits": 8}),
        (1, 16, True, {"splits": 4}),
        (1, 32, True, {"splits": 2, "warpgroups": 2}),
        (1, 512, True, {}),
        (8, 16, True, {"kv_tile": 128}),
        (32, 16, False, {"window": 2048}),
        (1, 16, True, {"window": 2048, "splits": 8}),
        (8, 16, False, {"window": 2048, "window_of_block": True}),
        (1, 512, True, {"window": 2048}),
    ],
)
def test_attention_compiles_without_spills(
    slots: int, width: int, causal: bool, sizes: dict, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for_h100(attend(causal, **sizes), attention_arguments(slots, width))
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
@pytest.mark.parametrize(
    ("slots", "group", "kv_heads", "causal"),
    [(1, 8, 8, True), (8, 8, 8, False), (1, 8, 2, True), (8, 5, 8, True), (1, 5, 8, False)],
)
def test_attention_over_split_row_tiles_compiles_without_spills(
    slots: int, group: int, kv_heads: int, causal: bool, monkeypatch, capfd
):
    """Of Qwen3-14B and 32B, and of a quarter of 32B."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    arguments = attention_arguments(slots, 16, group, HEAD_DIM, kv_heads)
    compile_for_h100(attend(causal), arguments)
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("slots", "width", "group", "causal", "window"),
    [
        (1, 1, 4, True, None),
        (1, 16, 4, False, None),
        (32, 9, 6, True, None),
        (8, 16, 6, True, 2048),
        (1, 512, 6, True, None),
    ],
)
def test_attention_with_wide_heads_compiles_without_spills(
    slots: int, width: int, group: int, causal: bool, window, page_size: int, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    arguments = attention_arguments(slots, width, group, 256, 4, page_size)
    compile_for_h100(attend(causal, window), arguments)
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
def test_both_columns_of_a_pair_are_cleared_by_their_position(monkeypatch, capfd):
    """Numbered by an iota of two axes, the second column lost the last position that is seen. The
    interpreter's iota has no pairs."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_for_h100(attend(True), attention_arguments(1, 32, 4, 256, 4))
    ptx = "".join(capfd.readouterr())
    pairs = re.findall(r"ld\.shared\.v2\.b16\s+\{(%rs\d+), (%rs\d+)\}", ptx)
    kept_if = dict(re.findall(r"selp\.b16\s+%rs\d+, (%rs\d+), 0x0000, (%p\d+)", ptx))
    assert len(pairs) == 32 * 256 // (2 * THREADS)
    assert all(kept_if[first] == kept_if[second] for first, second in pairs)


@pytest.mark.parametrize("group", [4, 6])
@pytest.mark.parametrize(("slots", "width"), [(1, 1), (1, 9), (1, 16), (8, 16), (32, 16), (1, 512)])
def test_wide_heads_fit_in_shared_memory_with_the_mailbox(slots: int, width: int, group: int):
    arguments = attention_arguments(slots, width, group, 256, 4)
    plan = attention.plan_of(*arguments, causal=True, window=None)
    assert plan.shared_bytes <= SHARED_BYTES
    assert plan.exchange.mailed == (plan.sizes.splits > 1)


@needs_compiler
@pytest.mark.parametrize("splits", [2, 8])
def test_splits_send_their_sums_without_a_fence(splits: int, monkeypatch, capfd):
    """A fence or a release beyond the thread block is one of the whole GPU to the hardware."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_for_h100(attend(True, splits=splits), attention_arguments(1, 16))
    ptx = "".join(capfd.readouterr())
    assert ptx.count("st.async") == splits * (4 + 64 // splits) // 4
    fences = re.findall(r"fence\.(?:acq_rel|sc)\S*|arrive\S*release\.cluster\S*", ptx)
    assert not fences
    assert "barrier.cluster.arrive.aligned" not in ptx  # which would release


def test_sums_go_through_global_memory_where_no_mailbox_fits_beside_the_tiles():
    shape = Shape(1, KV_HEADS, 16, 4, HEAD_DIM, PAGE_SIZE, max_pages=64)
    mailed = [
        make_plan(
            shape, BlockSizes(kv_tile, stages, splits=8), BF16, Mask(True), False
        ).exchange.mailed
        for kv_tile, stages in ((64, 2), (128, 2), (128, 3))
    ]
    assert mailed == [True, True, False]


@needs_compiler
def test_the_compiler_speaks_of_a_kernel_that_it_compiled_before(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    for _ in range(2):
        number_kernels(monkeypatch)
        jax.clear_caches()
        compile_for_h100(norm_rotate_write, write_arguments(2, 16), donate=(6, 7))
        assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
def test_writing_compiles_in_place_without_spills(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compile_for_h100(norm_rotate_write, write_arguments(1, 16), donate=(6, 7))
    assert_no_spills("".join(capfd.readouterr()))
    assert_in_place(program, pools=2)


@needs_compiler
@pytest.mark.parametrize("group", [4, 6])
def test_writing_wide_heads_compiles_without_spills(group: int, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for_h100(norm_rotate_write, write_arguments(1, 16, group, 256, 4, jnp.float32))
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
@pytest.mark.parametrize("group", [0, 1, 2, 4, 5, 8])
def test_what_bulk_copies_read_is_not_swizzled(group: int, monkeypatch, capfd):
    """A swizzle of fewer than eight rows is read differently than it is written."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_for_h100(norm_rotate_write, write_arguments(1, 2, group))
    ptx = "".join(capfd.readouterr())
    assert "cp.async.bulk" in ptx and ".shared" in ptx
    assert "xor.b32" not in ptx


@needs_compiler
def test_layers_share_pools_in_place_and_lower_one_kernel_of_each_kind():
    layers = 3

    def step(qkv, scale, cos, sin, rows, table, lengths, counts, *pools):
        out = []
        for i in range(layers):
            query, keys, values = norm_rotate_write(
                qkv, scale, scale, cos, sin, rows, *pools[2 * i : 2 * i + 2]
            )
            attended = attend(True)(query, keys, values, table, lengths, counts)
            qkv = qkv + attended.reshape(*attended.shape[:2], -1).repeat(2, -1)[..., : qkv.shape[3]]
            out += [keys, values]
        return qkv, out

    qkv, scale, _, cos, sin, rows, pool, _ = write_arguments(1, 16)
    *_, table, lengths, counts = attention_arguments(1, 16)
    arguments = (qkv, scale, cos, sin, rows, table, lengths, counts, *[pool] * (2 * layers))
    donate = tuple(range(8, 8 + 2 * layers))
    assert_in_place(compile_for_h100(step, arguments, donate), pools=2 * layers)
    assert lower(step, arguments).count("func.func private @paged_attention") == 1


def assert_in_place(program, pools: int) -> None:
    pool = (PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    assert program.memory_analysis().alias_size_in_bytes == pools * math.prod(pool) * 2
    assert_no_pool_copies(program, pool)
