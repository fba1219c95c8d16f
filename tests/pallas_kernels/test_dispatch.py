"""Which implementation runs where, and what the block sizes may depend on."""

import types

import pytest

from pallas_kernels.dispatch import choose, hopper, refuse_other_gpus
from pallas_kernels.paged_attention.blocks import Shape, choose_sizes, output_aligned


def device(platform: str, capability: str | None, kind: str = "some GPU"):
    known = {} if capability is None else {"compute_capability": capability}
    return types.SimpleNamespace(platform=platform, device_kind=kind, **known)


@pytest.mark.parametrize(
    ("platform", "capability", "answer"),
    [("gpu", "9.0", True), ("gpu", "8.0", False), ("gpu", "10.0", False), ("cpu", None, False)],
)
def test_only_hopper_is_hopper(platform: str, capability: str | None, answer: bool):
    assert hopper(device(platform, capability)) is answer


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_other_gpus_are_told_so(capability: str):
    where = device("gpu", capability)
    with pytest.raises(NotImplementedError, match="expects a Hopper GPU"):
        refuse_other_gpus("mosaic", where)
    refuse_other_gpus("portable", where)


@pytest.mark.parametrize("capability", ["7.5", "gfx942", None])
def test_the_portable_kernels_want_ampere(capability: str | None):
    with pytest.raises(NotImplementedError, match="since Ampere"):
        refuse_other_gpus("portable", device("gpu", capability))


@pytest.mark.parametrize("where", [device("gpu", "9.0"), device("cpu", None)])
@pytest.mark.parametrize("implementation", ["mosaic", "portable"])
def test_hopper_and_machines_without_a_gpu_may_compile(where, implementation: str):
    refuse_other_gpus(implementation, where)


def test_an_implementation_that_does_not_exist_is_named():
    with pytest.raises(NotImplementedError, match="'mosaic' does not exist"):
        choose("mosaic", {"xla": lambda: 0})


def test_the_last_implementation_may_say_no():
    def no():
        raise NotImplementedError("not this shape")

    with pytest.raises(NotImplementedError, match="not this shape"):
        choose("auto", {"xla": no})


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
