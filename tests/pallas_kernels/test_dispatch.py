"""Which implementation runs where, what is told when a kernel does not run, and what the block
sizes may depend on."""

import itertools
import types
from collections.abc import Callable

import jax.numpy as jnp
import pytest

from pallas_kernels import NotForThisKernel, dispatch
from pallas_kernels.dense_chain import ChainShape, chain_choice
from pallas_kernels.dispatch import Choice, Op, check_device, kernels_meant
from pallas_kernels.paged_attention.blocks import Shape, choose_sizes, output_aligned, tile
from pallas_kernels.paged_attention.plan import can_round, make_plan
from pallas_kernels.paged_attention.seen import Mask
from pallas_kernels.refusal import require
from pallas_kernels.tiles import SHARED_BYTES


def device(platform: str, capability: str | None, cores: int | None = 132):
    known = {"compute_capability": capability, "core_count": cores}
    known = {name: value for name, value in known.items() if value is not None}
    return types.SimpleNamespace(platform=platform, device_kind="some GPU", **known)


CPU, HOPPER, AMPERE = device("cpu", None), device("gpu", "9.0"), device("gpu", "8.0")


@pytest.fixture
def on(monkeypatch):
    """Makes this device the default one."""
    return lambda device: monkeypatch.setattr(dispatch, "default_device", lambda: device)


def op(mosaic=lambda size: "kernel ran", **others) -> Op:
    """An op whose kernel takes sizes up to 8."""

    def check(size: int) -> None:
        require(size <= 8, f"size {size}", "at most 8")

    return Op(
        "doubled", {"mosaic": mosaic, "xla": lambda size: "xla ran"} | others, {"mosaic": check}
    )


def with_portable(kernel: Callable[[int], object]) -> Op:
    """The same op with a portable kernel, which takes the same sizes."""
    without = op()
    checks = {"mosaic": without.checks["mosaic"], "portable": without.checks["mosaic"]}
    return Op(without.name, {**without.implementations, "portable": kernel}, checks)


class TestAuto:
    def test_the_kernel_runs_on_a_hopper_gpu(self, on):
        on(HOPPER)
        assert op()("auto", 8) == "kernel ran"
        assert op().choice("auto", 8) == Choice("mosaic")
        assert kernels_meant("auto") == "mosaic"

    def test_xla_runs_what_the_kernel_cannot_and_says_why(self, on):
        on(HOPPER)
        assert op()("auto", 9) == "xla ran"
        assert op().choice("auto", 9) == Choice("xla", "size 9; expected at most 8")

    @pytest.mark.parametrize(
        ("where", "reason"),
        [
            (CPU, "the device is a CPU; expected a Hopper GPU"),
            (device("gpu", "7.5"), r"some GPU (compute capability 7.5); expected a Hopper GPU"),
            (device("gpu", "gfx942"), "compute capability gfx942"),
            (device("gpu", None), "reports no compute_capability of some GPU"),
        ],
    )
    def test_other_devices_run_xla_and_say_why(self, on, where, reason: str):
        on(where)
        choice = with_portable(len).choice("auto", 8)
        assert choice.implementation == "xla" and reason in (choice.reason or "")
        assert kernels_meant("auto") is None

    @pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
    def test_portable_kernels_run_on_other_gpus(self, on, capability: str):
        on(device("gpu", capability))
        portable = with_portable(lambda size: "portable ran")
        assert portable("auto", 8) == "portable ran"
        assert portable.choice("auto", 8) == Choice("portable")
        assert kernels_meant("auto") == "portable"
        assert portable.choice("auto", 9) == Choice("xla", "size 9; expected at most 8")

    def test_without_a_portable_kernel_other_gpus_run_xla_and_say_why(self, on):
        on(AMPERE)
        reason = "the device is some GPU (compute capability 8.0); expected a Hopper GPU (sm_90)"
        assert op().choice("auto", 8) == Choice("xla", reason)
        assert op()("auto", 8) == "xla ran"

    def test_portable_kernels_do_not_run_on_a_hopper_gpu(self, on):
        on(HOPPER)
        assert with_portable(len).choice("auto", 8) == Choice("mosaic")
        assert with_portable(len).choice("portable", 8) == Choice("portable")

    @pytest.mark.parametrize("fault", [NotImplementedError, AttributeError, ValueError])
    def test_a_fault_inside_the_kernel_is_never_taken_for_a_refusal(self, on, fault):
        def broken(size: int):
            raise fault("jax cannot lower this")

        on(HOPPER)
        with pytest.raises(fault, match="jax cannot lower this"):
            op(broken)("auto", 8)

    def test_a_fault_inside_a_check_is_not_taken_for_one_either(self, on):
        def broken(size: int) -> None:
            raise NotImplementedError("of jax")

        on(HOPPER)
        with pytest.raises(NotImplementedError, match="of jax"):
            Op("doubled", {"mosaic": len, "xla": len}, {"mosaic": broken})("auto", 8)


class TestNamed:
    def test_a_kernel_that_is_named_runs_or_raises(self, on):
        on(HOPPER)
        assert op()("mosaic", 8) == "kernel ran"
        with pytest.raises(
            NotForThisKernel, match="^doubled on 'mosaic': size 9; expected at most 8"
        ):
            op()("mosaic", 9)

    def test_xla_runs_everywhere(self, on):
        for where in (CPU, HOPPER, AMPERE):
            on(where)
            assert op()("xla", 8) == "xla ran"
            assert op().choice("xla", 8) == Choice("xla", "xla was asked for")
            assert kernels_meant("xla") is None

    def test_an_implementation_that_does_not_exist_is_named(self):
        with pytest.raises(NotForThisKernel, match="'portable': it does not exist for this op"):
            op()("portable", 8)

    @pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
    def test_other_gpus_are_told_so(self, capability: str):
        where = device("gpu", capability)
        with pytest.raises(NotForThisKernel, match="expected a Hopper GPU"):
            check_device("mosaic", where)
        check_device("portable", where)

    @pytest.mark.parametrize("capability", ["7.5", "gfx942"])
    def test_the_portable_kernels_want_ampere(self, capability: str):
        with pytest.raises(NotForThisKernel, match="since Ampere"):
            check_device("portable", device("gpu", capability))

    @pytest.mark.parametrize("where", [HOPPER, CPU])
    @pytest.mark.parametrize("implementation", ["mosaic", "portable"])
    def test_hopper_and_machines_without_a_gpu_may_compile(self, where, implementation: str):
        check_device(implementation, where)


class TestTheChainNeedsAllMultiprocessors:
    """Its thread blocks wait for each other, so all have to be on the GPU at once."""

    SHAPE = ChainShape(16, 4096, 4096, 12288, 6144)

    def choice(self) -> Choice:
        return chain_choice(self.SHAPE, "bfloat16", "auto")

    def test_132_are_enough(self, on):
        on(HOPPER)
        assert self.choice() == Choice("mosaic")

    def test_fewer_are_not(self, on):
        on(device("gpu", "9.0", cores=114))
        assert "has 114 multiprocessors; expected at least 132" in (self.choice().reason or "")

    def test_a_gpu_that_does_not_say_is_no_silent_refusal(self, on):
        on(device("gpu", "9.0", cores=None))
        assert "reports no core_count of some GPU" in (self.choice().reason or "")
        with pytest.raises(NotForThisKernel, match="reports no core_count"):
            chain_choice(self.SHAPE, "bfloat16", "mosaic")


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("width", [1, 2, 9, 16, 17, 32, 512])
@pytest.mark.parametrize("slots", [1, 2, 8, 16, 32, 64])
def test_chosen_sizes_keep_what_the_kernel_asks_for(slots: int, width: int, group: int):
    for head_dim, kv_heads in itertools.product((64, 128, 256), (2, 4, 8)):
        shape = Shape(slots, kv_heads, width, group, head_dim, page_size=16, max_pages=256)
        sizes = choose_sizes(shape)
        assert sizes.splits in (1, 2, 4, 8)
        room = 132 if sizes.splits == 2 else 64
        clusters = shape.blocks * tile(shape, sizes).row_blocks
        assert sizes.splits == 1 or sizes.splits * clusters <= room
        assert output_aligned(shape, sizes.splits)
        for rounds in {False, can_round(shape, sizes)}:
            plan = make_plan(shape, sizes, jnp.bfloat16, Mask(True), False, rounds)
            assert plan.shared_bytes <= SHARED_BYTES
            assert plan.exchange.mailed == (sizes.splits > 1)


ROW_TILES = [
    (1, 8, 8, 128, (4, 1)),
    (8, 8, 8, 128, (2, 2)),
    (32, 8, 8, 128, (1, 2)),
    (1, 2, 8, 128, (8, 1)),
    (32, 2, 8, 128, (2, 2)),
    (1, 8, 5, 128, (2, 1)),
    (8, 8, 5, 128, (2, 2)),
    (1, 4, 6, 256, (8, 1)),
    (8, 4, 6, 256, (2, 1)),
    (32, 4, 6, 256, (1, 2)),
]
"""Slots, key-value heads, query heads of each, their size, and splits and warpgroups that are
fastest, or within a seventh of that, for 16 tokens and contexts of 1024 and 4096 on an H200
(`docs/results/attention-in-row-tiles-h200.json`)."""


@pytest.mark.parametrize(("slots", "kv_heads", "group", "head_dim", "chosen"), ROW_TILES)
def test_several_tiles_of_rows_are_split_or_share_what_they_load(
    slots: int, kv_heads: int, group: int, head_dim: int, chosen: tuple[int, int]
):
    shape = Shape(slots, kv_heads, 16, group, head_dim, page_size=64, max_pages=64)
    sizes = choose_sizes(shape)
    assert (sizes.splits, sizes.warpgroups) == chosen


@pytest.mark.parametrize(("slots", "splits"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 2), (16, 1)])
def test_pairs_may_fill_the_chip_and_larger_clusters_half_of_it(slots: int, splits: int):
    shape = Shape(slots, 8, width=16, group=4, head_dim=128, page_size=16, max_pages=64)
    assert choose_sizes(shape).splits == splits
