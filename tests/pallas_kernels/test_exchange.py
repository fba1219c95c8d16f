"""The kernel of `exchange_norm`: its arithmetic on a CPU, its instructions for several GPUs that
are not here. How GPUs wait for each other is in test_exchange_protocol.py, the reference on several
devices in tests/parallel. The interpreter of jax knows nothing of other devices' memory."""

import functools
import operator
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import TARGETS, assert_no_spills, compiled, needs_compiler
from interpreter import no_races
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import NotForThisKernel, dispatch
from pallas_kernels.add_norm import mosaic as add_norm
from pallas_kernels.dispatch import Choice
from pallas_kernels.exchange import (
    Inboxes,
    exchange_norm,
    inboxes_of,
    late_device,
    make_memory,
    mosaic,
    refusal_if_untried,
    specs_of,
)
from pallas_kernels.exchange.api import exchange_choice
from pallas_kernels.exchange.inboxes import BLOCKS, Layout, halves
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.tiles import THREADS, load, strided

EPS, AXIS = 1e-6, "shards"


class Received:
    """Stands for the wire of device 1. What all devices have sent is in an array, and the sums that
    owners have sent, if there are two shots, in another one. What this device sends goes to a third
    array, or, if it is a sum, to the second."""

    def __init__(self, registers, devices: int):
        self.registers, self.dtype = registers, jnp.bfloat16
        self.layout = Layout(devices, 0)
        self.products, self.sums, self.sent = None, None, None
        self.sends_sums = False

    def send(self, addresses, device, number, row, values, receivers) -> None:
        to = self.sums if self.sends_sums else self.sent
        assert to is not None
        to.at[row][...] = values

    def signal(self, *arguments) -> None: ...

    def wait(self, addresses, device, number, block, late, senders, seconds) -> None:
        """After an owner's wait, what is sent are sums."""
        self.sends_sums = len(senders) == self.layout.devices - 1

    def receive(self, addresses, device, number, row, senders) -> list:
        assert self.products is not None and self.sums is not None
        if len(senders) == 1:
            return [load(self.sums.at[row], self.registers)]
        return [load(self.products.at[d, row], self.registers) for d in senders]


def interpreted(x, addend, products, scale, late: int = 0, shots: int = 1):
    """The call of device 1, with the products of all devices in its inbox: what it sends, all sums
    if there are two shots, and its results. Sums of others are ones."""
    rows, hidden = x.shape
    wire = Received(strided(hidden, x.dtype), products.shape[0])

    def kernel(x, addend, scale, device, calls, late, products, sums, sent, *outputs):
        wire.products, wire.sums, wire.sent, wire.sends_sums = products, sums, sent, False
        arrays = x, addend, scale, None, device, calls, late
        mosaic.one_block(wire, shots, EPS, *arrays, *outputs)

    with no_races() as interpret:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = plgpu.kernel(
            kernel,
            out_type=(like, like, like, jax.ShapeDtypeStruct((1,), jnp.int32)),
            grid=(mosaic.blocks_of(rows, addend.shape[0]),),
            grid_names=("block",),
            num_threads=1,
            thread_name="warpgroup",
            interpret=interpret,
        )
        lists = [1], [41], [0, late, 0, 0, 0]
        numbers = [jnp.array(numbers, jnp.int32) for numbers in lists]
        sums = jax.new_ref(jnp.ones_like(x))
        found = jax.block_until_ready(run(x, addend, scale, *numbers, products, sums))
        return sums[...], *found


@pytest.mark.parametrize("blocks", [BLOCKS, 2])
@pytest.mark.parametrize(("dtype", "parts"), [("bfloat16", 1), ("float32", 3)])
@pytest.mark.parametrize("shots", [1, 2])
def test_the_parts_of_a_product_are_sent_as_one_and_what_arrived_is_added_as_parts_are(
    monkeypatch, shots, dtype, parts, blocks
):
    monkeypatch.setattr(mosaic, "BLOCKS", blocks)
    keys = jax.random.split(jax.random.key(0), 4)
    x, scale = (jax.random.normal(key, shape, "bfloat16")
                for key, shape in zip(keys, [(5, 256), (256,)]))  # fmt: skip
    addend = jax.random.normal(keys[2], (parts, *x.shape), dtype)
    products = jax.random.normal(keys[3], (3, *x.shape), "bfloat16")
    sums, sent, *found, calls = interpreted(x, addend, products, scale, shots=shots)
    whole = functools.reduce(operator.add, addend.astype(jnp.float32)).astype(jnp.bfloat16)
    assert sent.tolist() == whole.tolist()
    added = functools.reduce(operator.add, products.astype(jnp.float32)).astype(jnp.bfloat16)
    if shots == 2:
        of_block = jnp.arange(5) % mosaic.blocks_of(5, parts)
        added = jnp.where((of_block % 3 == 1)[:, None], added, 1)
        assert sums.tolist() == added.tolist()
    with no_races() as interpret:
        wide = added[None].astype(jnp.float32)
        wanted = add_norm.add_norm(x, wide, scale, eps=EPS, interpret=interpret)
        jax.block_until_ready(wanted)
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
    assert calls.tolist() == [42]


def test_a_block_that_has_waited_in_vain_has_no_numbers():
    x, products = jnp.ones((5, 256), jnp.bfloat16), jnp.ones((2, 5, 256), jnp.bfloat16)
    for found in interpreted(x, products[:1], products, x[0], late=2)[2:4]:
        assert np.isnan(found.astype(jnp.float32)).any(axis=1).tolist() == [0, 1, 0, 0, 0]
        assert np.isnan(found[1].astype(jnp.float32)).all()


def arguments(
    devices: int, rows: int, hidden: int, dtype, parts: int = 1, mesh: Mesh | None = None
) -> tuple:
    """The shapes of a call, on these devices or for one of them."""

    def shape(sizes: tuple[int, ...], dtype, spread: bool = False):
        spec = PartitionSpec(AXIS) if spread else PartitionSpec()
        sharding = NamedSharding(mesh, spec) if mesh else None
        parts = devices if mesh and spread else 1
        whole = (parts * sizes[0], *sizes[1:]) if sizes else ()
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    inboxes = object.__new__(Inboxes)
    fields = {
        "addresses": shape((devices, 2), jnp.uint32),
        "device": shape((1,), jnp.int32, spread=True),
        "calls": shape((), jnp.int32),
        "late": shape((BLOCKS,), jnp.int32, spread=True),
        "room": rows * hidden * 2,
    }
    for name, field in fields.items():
        object.__setattr__(inboxes, name, field)
    row = shape((rows, hidden), jnp.bfloat16)
    addend = shape((parts, rows, hidden), dtype, spread=True)
    return row, addend, shape((hidden,), jnp.bfloat16), inboxes


class TestItSaysNo:
    def refusal(self, *sizes, **changes) -> str:
        *arrays, inboxes = arguments(*sizes)
        for name, value in changes.items():
            object.__setattr__(inboxes, name, value)
        with pytest.raises(NotForThisKernel) as refusal:
            exchange_choice("mosaic", *arrays, inboxes, eps=EPS, axis_name=AXIS)
        return str(refusal.value)

    def test_to_rows_that_threads_cannot_share(self):
        assert "hidden size 128; expected a multiple of 256" in self.refusal(2, 4, 128, "bfloat16")

    def test_to_more_than_an_inbox_holds(self):
        said = self.refusal(2, 4, 256, "bfloat16", room=2047)
        assert "a message of 2048 bytes; expected at most 2047" in said

    def test_to_other_dtypes(self):
        assert "an addend in float16" in self.refusal(2, 4, 256, "float16")

    def test_on_auto_without_a_hopper_gpu(self):
        choice = exchange_choice("auto", *arguments(2, 4, 256, "bfloat16"), eps=EPS, axis_name=AXIS)
        assert choice == Choice("xla", "the device is a CPU; expected a Hopper GPU")


def test_which_gpus_have_run_it(monkeypatch):
    def refusal(platform: str, kind: str) -> str | None:
        device = types.SimpleNamespace(platform=platform, device_kind=kind)
        monkeypatch.setattr(dispatch, "default_device", lambda: device)
        return refusal_if_untried()

    assert refusal("cpu", "cpu") is None and refusal("gpu", "NVIDIA H200") is None
    assert refusal("gpu", "NVIDIA H100 PCIe") == (
        "not tried on NVIDIA H100 PCIe; expected NVIDIA H100 80GB HBM3 or NVIDIA H200"
    )


def test_addresses_are_taken_apart():
    addresses = [0x7FFF_1234_8765_4300, 0x10]
    assert halves(addresses).tolist() == [[0x8765_4300, 0x7FFF_1234], [0x10, 0]]


def test_who_was_late():
    late = np.zeros(2 * BLOCKS, np.int32)
    assert late_device(late) is None
    late[130] = 1
    assert late_device(late) == 0


REGISTERS, MULTIPROCESSORS = 65536, 132
"""Of an H100: registers of one multiprocessor, and their number."""
SIZES = [
    (2, 16, 4096, "bfloat16", 1),
    (2, 512, 5120, "bfloat16", 1),
    (2, 512, 5120, "float32", 2),
    (2, 512, 5120, "float32", 4),
    (2, 128, 4096, "float32", 4),
    (4, 64, 5120, "bfloat16", 1),
    (4, 128, 5120, "float32", 4),
    (4, 512, 5120, "bfloat16", 1),
    (4, 512, 5120, "float32", 2),
]


@needs_compiler
@pytest.mark.parametrize(("devices", "rows", "hidden", "dtype", "parts"), SIZES)
def test_it_compiles_for_gpus_that_are_not_here(
    devices, rows, hidden, dtype, parts, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=TARGETS.joinpath("h100.txtpb").read_text(),
        topology=f"1x1x{devices}",
    )
    mesh = Mesh(np.array(found.devices), (AXIS,))
    given = arguments(devices, rows, hidden, dtype, parts, mesh)
    specs = specs_of(given[-1], AXIS)

    def two_calls(x, addend, scale, inboxes):
        run = functools.partial(exchange_norm, eps=EPS, axis_name=AXIS, implementation="mosaic")
        total, _, inboxes = run(x, addend, scale, inboxes)
        return run(total, addend, scale, inboxes)

    spread = jax.shard_map(
        two_calls,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(), specs),
        out_specs=(PartitionSpec(), PartitionSpec(), specs),
        check_vma=False,
    )
    program = compiled(jax.jit(spread, donate_argnums=3).lower(*given)).as_text()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', program)) == 2
    for other in ("all-reduce", "all-gather", "partition-id", "copy("):
        assert f" {other}" not in program
    assert "uses_xla_collective_metadata = false" in program, "no barrier of jax's before a call"
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    all_run_at_once(output, mosaic.blocks_of(rows, parts))
    instructions_are_in_order(output, devices, mosaic.shots_of(devices, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 64, 130, 512, 700])
@pytest.mark.parametrize("devices", [2, 4])
def test_on_devices(devices, rows):
    """A thousand calls. The norm of each is part of the product of the next."""
    if devices > len(jax.devices()):
        pytest.skip(f"needs {devices} GPUs")
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    hidden, calls, runs = 5120, 10, 100
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, "bfloat16")
    given = (
        place(draw(0, rows, hidden)),
        place(draw(1, 2 * devices, rows, hidden), AXIS),
        place(draw(2, hidden)),
    )
    memory = make_memory(mesh, rows * hidden * 2)
    inboxes = inboxes_of(memory)

    def chained(implementation: str):
        exchange = functools.partial(
            exchange_norm, eps=EPS, axis_name=AXIS, implementation=implementation
        )

        def many(x, products, scale, inboxes):
            begun = jax.lax.psum(inboxes.late.sum(), AXIS)  # no device begins before all are loaded
            total, normed, inboxes = exchange(x + begun.astype(x.dtype), products, scale, inboxes)
            first = total
            for _ in range(calls - 1):
                x = (0.5 * total).astype(x.dtype)
                total, normed, inboxes = exchange(x, products + normed, scale, inboxes)
            return first[None], normed[None], inboxes

        of_each, same, specs = PartitionSpec(AXIS), PartitionSpec(), specs_of(inboxes, AXIS)
        over = jax.shard_map(
            many,
            mesh=mesh,
            in_specs=(same, of_each, same, specs),
            out_specs=(of_each, of_each, specs),
            check_vma=False,
        )
        return jax.jit(over)

    wanted_first, wanted_last, _ = chained("xla")(*given, inboxes)
    run, bits = chained("mosaic"), None
    for _ in range(runs):
        first, last, inboxes = run(*given, inboxes)
        assert late_device(np.asarray(inboxes.late)) is None
        found = np.asarray(first).view(np.uint16), np.asarray(last).view(np.uint16)
        bits = found if bits is None else bits
        for of_devices, of_first_run in zip(found, bits):
            assert (of_devices == of_first_run[0]).all()
    assert (np.asarray(first) == np.asarray(wanted_first)).all()
    wanted = np.asarray(wanted_last, np.float32)
    error = np.abs(np.asarray(last, np.float32) - wanted).max()
    assert error <= 2.0**-5 * np.abs(wanted).max(), "more than a few roundings"
    assert int(inboxes.calls) == calls * runs


def all_run_at_once(output: str, blocks: int) -> None:
    """An H100 has room for all these thread blocks, of 128 threads, at the same time."""
    [registers] = {int(found) for found in re.findall(r"Used (\d+) registers", output)}
    on_each = REGISTERS // (THREADS * registers)
    assert on_each * MULTIPROCESSORS >= blocks, f"{registers} registers: {on_each} blocks on each"


def instructions_are_in_order(ptx: str, devices: int, shots: int) -> None:
    """In each shot rows are stored, all threads meet, and one per GPU stores a flag with release.
    Threads wait for flags with acquire, all meet, and only then is anything read."""
    kernel = ptx[ptx.index(".visible .entry") :]
    kernel = kernel[: kernel.index("\n}")]
    places = lambda text: [found.start() for found in re.finditer(text, kernel)]
    flags, waits = places(r"st\.release\.sys\.global"), places(r"ld\.acquire\.sys\.global")
    assert len(flags) == len(waits) == shots
    # What this kernel stores and loads by address has no tab behind the instruction.
    stores, loads = places(r"\tst\.global\.v\d\.b32 \["), places(r"\tld\.global\.v\d\.b32 \{")
    barriers = places(r"bar\.sync")
    between = lambda first, last: any(first < place < last for place in barriers)
    for flag in flags:
        assert between(max(place for place in stores if place < flag), flag)
    for wait in waits:
        assert between(wait, min(place for place in loads if place > wait))
    ends = zip([0, *flags], flags)
    stored = [sum(begin < place < end for place in stores) for begin, end in ends]
    assert stored[-1] % devices == 0 and stored[-1] > 0
    assert shots == 1 or stored[0] * devices == stored[1], "a row to one GPU, its sum to all"
    assert flags[0] < waits[0] < loads[0]
    assert "multimem" not in kernel and "ld.global.nc" not in kernel
    assert kernel.index("globaltimer") < waits[0]
