"""Which implementation runs where, what is told when a kernel does not run, and what the block
sizes may depend on."""

import types

import pytest

from pallas_kernels import NotForThisKernel, dispatch
from pallas_kernels.dense_chain import ChainShape, chain_choice
from pallas_kernels.dispatch import Choice, Op, check_device, kernels_run
from pallas_kernels.paged_attention.blocks import Shape, choose_sizes, output_aligned
from pallas_kernels.refusal import require


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


class TestAuto:
    def test_the_kernel_runs_on_a_hopper_gpu(self, on):
        on(HOPPER)
        assert op()("auto", 8) == "kernel ran"
        assert op().choice("auto", 8) == Choice("mosaic")
        assert kernels_run("auto")

    def test_xla_runs_what_the_kernel_cannot_and_says_why(self, on):
        on(HOPPER)
        assert op()("auto", 9) == "xla ran"
        assert op().choice("auto", 9) == Choice("xla", "size 9; expected at most 8")

    @pytest.mark.parametrize(
        ("where", "reason"),
        [
            (CPU, "the device is a CPU; expected a Hopper GPU"),
            (AMPERE, r"some GPU (compute capability 8.0); expected a Hopper GPU (sm_90)"),
            (device("gpu", "10.0"), "compute capability 10.0"),
            (device("gpu", "gfx942"), "compute capability gfx942"),
            (device("gpu", None), "reports no compute_capability of some GPU"),
        ],
    )
    def test_other_devices_run_xla_and_say_why(self, on, where, reason: str):
        on(where)
        choice = op().choice("auto", 8)
        assert choice.implementation == "xla" and reason in (choice.reason or "")
        assert not kernels_run("auto")

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
            assert not kernels_run("xla")

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


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("width", [1, 2, 16, 17, 32, 512])
@pytest.mark.parametrize("slots", [1, 2, 8, 32, 64])
def test_chosen_sizes_keep_what_the_kernel_asks_for(slots: int, width: int, group: int):
    for head_dim in (64, 128):
        shape = Shape(slots, 8, width, group, head_dim, page_size=16, max_pages=256)
        sizes = choose_sizes(shape)
        assert sizes.splits in (1, 2, 4, 8)
        room = 132 if sizes.splits == 2 else 64
        assert sizes.splits == 1 or sizes.splits * shape.blocks <= room
        assert sizes.splits == 1 or sizes.warpgroups == 1
        assert output_aligned(shape, sizes.splits)


@pytest.mark.parametrize(("slots", "splits"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 2), (16, 1)])
def test_pairs_may_fill_the_chip_and_larger_clusters_half_of_it(slots: int, splits: int):
    shape = Shape(slots, 8, width=16, group=4, head_dim=128, page_size=16, max_pages=64)
    assert choose_sizes(shape).splits == splits
