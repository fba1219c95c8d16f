"""Every implementation of paged attention against a float64 oracle."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Inputs, expected, inputs, kept_rows, relative_error
from interpreter import no_races

from pallas_kernels import NotForThisKernel, dispatch, pack_queries, paged_attention
from pallas_kernels.paged_attention import in_pieces, mosaic, plan, reference
from pallas_kernels.paged_attention.blocks import FEWER_SHORT_TILES, SHORT_TILES, BlockSizes

ROUNDING = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
"""Relative error that the output type and weights of that type leave."""

SMALL = [
    Case((62, 126), width=4),
    Case((0, 37, 100), width=4),
    Case((70, 3), width=4, causal=False),
    Case((126,), width=1, kv_heads=2, group=7),
    Case((60,), width=5, counts=(2,)),
    Case((5, 63), width=5, causal=False, counts=(5, 1), page_size=128, spare_pages=0),
    Case((50,), width=3, head_dim=128, group=2, page_size=32),
]
WIDE_HEADS = [
    Case((62, 30), width=4, head_dim=256),
    Case((40,), width=9, head_dim=256, group=6, page_size=64, causal=False, counts=(7,)),
    Case((100,), width=2, head_dim=256, window=9),
]
"""Of Qwen3.5: four or six query heads per key-value head."""
WIDE_HEADS_IN_ROW_TILES = [
    Case((30,), width=17, head_dim=256, group=6),
    Case((70,), width=32, head_dim=256, page_size=64),
]
WIDE = [Case((61,), width=17), Case((10,), width=32, causal=False), Case((70,), width=40)]
WINDOWED = [
    Case((100, 3), width=4, window=9),
    Case((200, 64), width=4, causal=False, window=70),
    Case((200, 60), width=4, causal=False, window=70, window_of_block=True, counts=(4, 3)),
    Case((129, 130), width=2, window=1),
]
WINDOWED_ROW_TILES = [
    Case((70,), width=40, window=12),
    Case((140,), width=32, causal=False, window=40),
]
LARGE = [
    Case((0, 1, 511, 4095, 8000), width=width, causal=causal, kv_heads=8, head_dim=128)
    for width, causal in ((1, True), (16, True), (16, False), (32, True))
] + [
    Case((0, 1, 511, 4095, 8000), width=16, causal=False, kv_heads=8, head_dim=128, window=2048),
    Case((700, 33), width=16, kv_heads=8, group=2, head_dim=64, page_size=64),
    Case((700, 33), width=9, kv_heads=2, group=5, head_dim=128, page_size=128, counts=(3, 9)),
    Case((0, 300), width=512, kv_heads=8, head_dim=128),
    Case((0, 300), width=256, kv_heads=8, head_dim=128, counts=(256, 100)),
    Case((100,), width=16, dtype="float16", kv_heads=8, head_dim=128),
    Case((0, 1, 511, 4095), width=16, kv_heads=4, head_dim=256),
    Case((4095,), width=16, kv_heads=4, group=6, head_dim=256, page_size=64),
    Case((0, 300), width=512, kv_heads=4, group=6, head_dim=256),
]
QWEN3_32B = {"width": 16, "kv_heads": 8, "group": 8, "head_dim": 128, "page_size": 64}
QWEN3_14B = QWEN3_32B | {"group": 5}
QUARTER_OF_32B = QWEN3_32B | {"kv_heads": 2}
SPLIT_ROW_TILES = [
    Case((4095,), **QWEN3_32B),
    Case((700, 33, 0, 1, 511, 63, 64, 2000), **QWEN3_32B),
    Case((700, 33, 0, 1, 511, 63, 64, 2000), causal=False, counts=(3, 16) * 4, **QWEN3_32B),
    Case((4095,), causal=False, **QWEN3_14B),
    Case((700, 33, 0, 1, 511, 63, 64, 2000), **QWEN3_14B),
    Case((4095,), window=2048, **QUARTER_OF_32B),
    Case((700, 33) * 16, **QUARTER_OF_32B),
    Case((700,), width=17, kv_heads=4, group=6, head_dim=256, page_size=64),
    Case((700, 33) * 4, width=16, kv_heads=4, group=6, head_dim=256, page_size=64),
]
"""Several tiles of rows, whose contexts are split: into all numbers of splits, and with one and
with two warpgroups."""
SEVERAL_PAGES = [
    case
    for case in SMALL + WIDE + WIDE_HEADS + WINDOWED + WINDOWED_ROW_TILES
    if case.max_pages * case.page_size > max(48, case.page_size)
]
ALONE = Case((4095,), width=16, kv_heads=8, head_dim=128)
"""One slot, so that four and eight splits hand their sums over in shared memory."""


def agrees(case: Case, attend) -> None:
    given = inputs(case)
    out = attend(given)
    assert out.shape == expected(case).shape
    error = relative_error(kept_rows(case, out), kept_rows(case, expected(case)))
    assert error < ROUNDING[case.dtype]


def attend(given: Inputs, case: Case, implementation: str, **options) -> jax.Array:
    call = functools.partial(
        paged_attention, implementation=implementation, **{**case.options, **options}
    )
    return jax.jit(call)(*given.arguments())


def with_sizes(given: Inputs, case: Case, sizes: BlockSizes) -> jax.Array:
    return mosaic.paged_attention(*given.arguments(), **case.options, sizes=sizes)


def interpreted(given: Inputs, case: Case, sizes: BlockSizes) -> jax.Array:
    with no_races() as interpret:
        out = mosaic.paged_attention(
            *given.arguments(), **case.options, sizes=sizes, interpret=interpret
        )
        return jax.block_until_ready(out)


class TestReference:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize(
        "case",
        SMALL + WIDE + WIDE_HEADS + WINDOWED + WINDOWED_ROW_TILES,
        ids=lambda case: case.name,
    )
    def test_agrees(self, case: Case, dtype: str):
        case = Case(**{**vars(case), "dtype": dtype})
        agrees(case, lambda given: attend(given, case, "xla"))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("case", SEVERAL_PAGES, ids=lambda case: case.name)
    def test_agrees_in_pieces(self, case: Case, dtype: str, monkeypatch):
        monkeypatch.setattr(in_pieces, "PIECE", 48)
        monkeypatch.setattr(in_pieces, "WITHOUT_A_LOOP_ON_GPUS", 48)
        monkeypatch.setattr(reference, "paged_attention", None)
        case = Case(**{**vars(case), "dtype": dtype})
        agrees(case, lambda given: attend(given, case, "xla"))

    @pytest.mark.parametrize(
        ("batch", "width", "positions"),
        [(1, 16, 36864), (32, 1, 1152), (32, 16, 1152), (1, 512, 16384), (8, 512, 2048)],
    )
    def test_a_gpu_gathers_all_of_a_small_batch(self, monkeypatch, batch, width, positions):
        query = batch, 8, width, 4, 128
        assert in_pieces.whole_on_gpus(query, 16) == 0
        gpu = types.SimpleNamespace(platform="gpu")
        monkeypatch.setattr(dispatch, "default_device", lambda: gpu)
        assert in_pieces.whole_on_gpus(query, 16) == positions // 16

    def test_no_piece_is_read_beyond_the_longest_context(self, monkeypatch):
        """That of a request without tokens in the block does not count."""
        monkeypatch.setattr(in_pieces, "PIECE", 32)
        case = Case((40, 3, 300), width=4, counts=(4, 4, 0), dtype="float32")
        given = inputs(case)
        lost = given.page_table.at[:, 4:].set(10**6)
        gathered, gather = [], reference.gather_pages

        def noted(pool, pages):
            jax.debug.callback(lambda pages: gathered.append(pages.max()), pages)
            return gather(pool, pages)

        monkeypatch.setattr(reference, "gather_pages", noted)
        attended = attend(Inputs(**(vars(given) | {"page_table": lost})), case, "xla")
        jax.block_until_ready(attended)
        jax.effects_barrier()
        assert len(gathered) == 2 * 2 and max(gathered) < 10**6
        error = relative_error(kept_rows(case, attended), kept_rows(case, expected(case)))
        assert error < ROUNDING["float32"]

    def test_a_token_s_bits_do_not_depend_on_how_far_others_are_read(self, monkeypatch):
        monkeypatch.setattr(in_pieces, "PIECE", 32)
        case = Case((40, 300), width=4, dtype="float32")
        given = inputs(case)
        beside = attend(given, case, "xla")[0]
        shorter = Inputs(**(vars(given) | {"lengths": given.lengths.at[1].set(0)}))
        np.testing.assert_array_equal(beside, attend(shorter, case, "xla")[0])

    def test_a_request_without_tokens_gives_zeros(self, monkeypatch):
        monkeypatch.setattr(in_pieces, "PIECE", 32)
        case = Case((40, 0), width=4, counts=(4, 0), spare_pages=4, dtype="float32")
        assert not np.asarray(attend(inputs(case), case, "xla")[1]).any()

    def test_a_window_hides_what_is_farther(self):
        case = Case((40,), width=1, dtype="float32")
        given = inputs(case)
        near = attend(given, case, "xla", window=8)
        first_pages = given.page_table[0, :2]
        moved = vars(given) | {
            name: getattr(given, name).at[first_pages].set(7.0)
            for name in ("key_pages", "value_pages")
        }
        np.testing.assert_array_equal(near, attend(Inputs(**moved), case, "xla", window=8))
        assert not np.array_equal(near, attend(given, case, "xla"))


class TestInterpreted:
    """At most two threads: the interpreter's threads wait for each other on real cores."""

    @pytest.mark.parametrize("case", SMALL + WINDOWED, ids=lambda case: case.name)
    def test_agrees_in_two_splits(self, case: Case):
        agrees(case, lambda given: interpreted(given, case, BlockSizes(splits=2)))

    @pytest.mark.parametrize("case", WIDE + WINDOWED_ROW_TILES, ids=lambda case: case.name)
    def test_agrees_if_every_row_tile_is_split(self, case: Case):
        agrees(case, lambda given: interpreted(given, case, BlockSizes(splits=2)))

    @pytest.mark.parametrize("case", [*SMALL[::3], *WINDOWED[::3]], ids=lambda case: case.name)
    def test_agrees_without_splits(self, case: Case):
        agrees(case, lambda given: interpreted(given, case, BlockSizes(splits=1)))

    @pytest.mark.parametrize(
        ("case", "splits"),
        [*((case, 2) for case in WIDE_HEADS), (WIDE_HEADS[0], 1)],
        ids=lambda part: part.name if isinstance(part, Case) else str(part),
    )
    def test_agrees_with_wide_heads(self, case: Case, splits: int):
        sizes = BlockSizes(**SHORT_TILES, splits=splits)
        agrees(case, lambda given: interpreted(given, case, sizes))

    def test_agrees_with_wide_heads_if_every_row_tile_is_split(self):
        case = WIDE_HEADS_IN_ROW_TILES[0]
        sizes = BlockSizes(**FEWER_SHORT_TILES, splits=2)
        agrees(case, lambda given: interpreted(given, case, sizes))

    @pytest.mark.parametrize("case", WIDE_HEADS_IN_ROW_TILES, ids=lambda case: case.name)
    def test_agrees_with_wide_heads_where_row_tiles_share_their_keys(self, case: Case):
        sizes = BlockSizes(**SHORT_TILES, warpgroups=2)
        agrees(case, lambda given: interpreted(given, case, sizes))

    def test_agrees_with_long_tiles(self):
        case = Case((200,), width=2)
        agrees(case, lambda given: interpreted(given, case, BlockSizes(kv_tile=128)))

    @pytest.mark.parametrize("case", WIDE[1:] + WINDOWED_ROW_TILES, ids=lambda case: case.name)
    def test_agrees_where_row_tiles_share_their_keys(self, case: Case):
        agrees(case, lambda given: interpreted(given, case, BlockSizes(warpgroups=2)))


@pytest.mark.gpu
class TestOnDevice:
    @pytest.mark.parametrize(
        "case",
        SMALL
        + WIDE
        + WIDE_HEADS
        + WIDE_HEADS_IN_ROW_TILES
        + WINDOWED
        + WINDOWED_ROW_TILES
        + LARGE
        + SPLIT_ROW_TILES,
        ids=lambda case: case.name,
    )
    def test_agrees(self, case: Case):
        agrees(case, lambda given: attend(given, case, "mosaic"))

    @pytest.mark.parametrize("splits", [2, 4, 8])
    @pytest.mark.parametrize("case", [*LARGE[:3], ALONE], ids=lambda case: case.name)
    def test_agrees_with_every_number_of_splits(self, case: Case, splits: int):
        agrees(case, lambda given: with_sizes(given, case, BlockSizes(splits=splits)))

    @pytest.mark.parametrize(
        "sizes",
        [BlockSizes(splits=2, warpgroups=2), BlockSizes(kv_tile=128, stages=3, splits=8)],
        ids=["a box per warpgroup", "no room for messages"],
    )
    def test_agrees_however_sums_are_handed_over(self, sizes: BlockSizes):
        agrees(ALONE, lambda given: with_sizes(given, ALONE, sizes))

    @pytest.mark.parametrize("splits", [2, 8])
    def test_both_ways_of_handing_over_give_the_same_bits(self, splits: int, monkeypatch):
        sizes, ways = BlockSizes(splits=splits), []

        def noted(*arguments):
            made = plan.make_plan(*arguments)
            ways.append(made.exchange.mailed)
            return made

        monkeypatch.setattr(mosaic, "make_plan", noted)
        mosaic.paged_attention_call.clear_cache()
        mailed = with_sizes(inputs(ALONE), ALONE, sizes)
        monkeypatch.setattr(plan, "SHARED_BYTES", 0)
        mosaic.paged_attention_call.clear_cache()
        np.testing.assert_array_equal(mailed, with_sizes(inputs(ALONE), ALONE, sizes))
        mosaic.paged_attention_call.clear_cache()
        assert ways == [True, False]


class TestBits:
    """A row at one position, in blocks that start earlier, in other slots, beside others."""

    STARTS = (126, 124, 123)
    ROW = 126

    def rows(self, attend, case: Case) -> list[np.ndarray]:
        alike = self.same_context(case)
        out = np.asarray(attend(alike, case).astype(jnp.float32))
        return [out[slot, self.ROW - start] for slot, start in enumerate(case.lengths)]

    def same_context(self, case: Case) -> Inputs:
        given = inputs(case)
        rng = np.random.default_rng(5)
        positions = self.ROW + case.width
        tokens = rng.normal(size=(3, positions, case.kv_heads, case.group, case.head_dim))
        query = jnp.stack(
            [jnp.asarray(tokens[0, start : start + case.width]) for start in case.lengths]
        ).astype(given.query.dtype)
        pools = [np.array(given.key_pages), np.array(given.value_pages)]
        for slot, start in enumerate(case.lengths):
            position = np.arange(start + case.width)
            pages = np.asarray(given.page_table)[slot, position // case.page_size]
            for pool, numbers in zip(pools, tokens[1:, :, :, 0]):
                pool[pages, position % case.page_size] = numbers[: start + case.width]
        packed = pack_queries(query.reshape(*query.shape[:2], -1, case.head_dim), case.kv_heads)
        return Inputs(packed, *map(jnp.asarray, pools), *given.arguments()[3:])

    def check(self, attend, window: int | None = None, case: Case | None = None) -> None:
        case = case or Case(self.STARTS, width=4, kv_heads=1, window=window)
        first, *others = self.rows(attend, case)
        assert np.isfinite(first).all()
        for other in others:
            np.testing.assert_array_equal(first, other)

    @pytest.mark.parametrize("splits", [1, 2])
    def test_interpreted(self, splits: int):
        self.check(lambda given, case: interpreted(given, case, BlockSizes(splits=splits)))

    @pytest.mark.parametrize("splits", [1, 2])
    def test_a_tile_before_the_window_of_one_block_is_read_in_another(self, splits: int):
        # The row sees positions from 65 on. A block that starts at 123 sees them from 62 on, and so
        # begins with a tile that this row does not see.
        sizes = BlockSizes(splits=splits)
        self.check(lambda given, case: interpreted(given, case, sizes), window=62)

    IN_ROW_TILES = Case((126, 117, 108), width=19, kv_heads=1)
    """The row is in the first, in both and in the second of two row tiles, which share a token."""

    def test_in_row_tiles_interpreted(self):
        attend = lambda given, case: interpreted(given, case, BlockSizes(splits=2))
        self.check(attend, case=self.IN_ROW_TILES)

    @pytest.mark.gpu
    @pytest.mark.parametrize("warpgroups", [1, 2])
    @pytest.mark.parametrize("splits", [1, 2, 4])
    def test_in_row_tiles_on_device(self, splits: int, warpgroups: int):
        sizes = BlockSizes(splits=splits, warpgroups=warpgroups)
        self.check(lambda given, case: with_sizes(given, case, sizes), case=self.IN_ROW_TILES)

    @pytest.mark.gpu
    @pytest.mark.parametrize("window", [None, 62])
    @pytest.mark.parametrize("splits", [1, 2, 4])
    def test_on_device(self, splits: int, window: int | None):
        sizes = BlockSizes(splits=splits)
        self.check(lambda given, case: with_sizes(given, case, sizes), window)


class TestRefusals:
    @pytest.mark.parametrize(
        ("case", "options"),
        [
            (Case((4,), dtype="float32"), {}),
            (Case((4,), width=5, causal=False), {"window": 4}),
            (Case((4,), head_dim=32), {}),
            (Case((4,), group=65), {}),
            (Case((4,), page_size=24), {}),
        ],
        ids=["float32", "window", "head_dim 32", "65 heads per key", "page size 24"],
    )
    def test_the_kernel_says_no(self, case: Case, options: dict):
        with pytest.raises(NotForThisKernel, match="expected"):
            attend(inputs(case), case, "mosaic", **options)

    def test_auto_takes_the_reference_where_no_hopper_is(self):
        case = Case((4, 9), width=2)
        given = inputs(case)
        if jax.default_backend() == "cpu":
            by_itself = attend(given, case, "auto")
            np.testing.assert_array_equal(by_itself, attend(given, case, "xla"))
