"""`exchanging_chain`: its arithmetic on a CPU, its instructions for several GPUs that are not here,
and everything on machines that have several. How GPUs wait for each other is in
test_exchange_protocol.py."""

import dataclasses
import functools
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
from pallas_kernels.dense_chain import (
    ChainShape,
    ChainWeights,
    exchanging_chain,
    first_arrivals,
    mosaic,
)
from pallas_kernels.dense_chain.plan import Plan, Sizes
from pallas_kernels.dense_chain.shape import MOST_TOKENS
from pallas_kernels.exchange import Inboxes, inboxes_of, late_device, make_memory, specs_of
from pallas_kernels.exchange.inboxes import BLOCKS, Layout

EPS, AXIS = 1e-6, "shards"
SMALL = ChainShape(24, 512, 512, 512, 128)
"""Of each device. Both warpgroups multiply the middle group of rows."""
EVERYWHERE = PartitionSpec()
QWEN3_8B = ChainShape(16, 4096, 4096, 12288, 6144)
CUT = (
    PartitionSpec(None, AXIS),
    PartitionSpec(),
    PartitionSpec(AXIS),
    PartitionSpec(),
    PartitionSpec(None, AXIS),
    PartitionSpec(AXIS),
    PartitionSpec(),
    PartitionSpec(None, AXIS),
)
"""How attended, x, out, norm, gate_up, down, next_norm and qkv lie on the devices."""


def sizes_of(shape: ChainShape, devices: int = 1) -> tuple[tuple[int, ...], ...]:
    """The sizes of these arrays, on one of so many devices."""
    attended, inner, qkv = (n // devices for n in (shape.attended, shape.inner, shape.qkv))
    return (
        (shape.tokens, attended),
        (shape.tokens, shape.hidden),
        (attended, shape.hidden),
        (shape.hidden,),
        (shape.hidden, 2 * inner),
        (inner, shape.hidden),
        (shape.hidden,),
        (shape.hidden, qkv),
    )


def of_all(shape: ChainShape, devices: int) -> ChainShape:
    """The sizes of all devices together, from those of each."""
    cut = {name: getattr(shape, name) * devices for name in ("attended", "inner", "qkv")}
    return dataclasses.replace(shape, **cut)


def drawn(shape: ChainShape) -> list[jax.Array]:
    """Arrays as they lie on all devices: gate and up of each device are beside each other."""
    keys = jax.random.split(jax.random.key(0), 8)
    scales = [1, 1, shape.attended**-0.5, 1, shape.hidden**-0.5, shape.inner**-0.5, 1]
    scales.append(shape.hidden**-0.5)
    draw = lambda key, size, scale: (jax.random.normal(key, size) * scale).astype(jnp.bfloat16)
    return [draw(*each) for each in zip(keys, sizes_of(shape), scales, strict=True)]


def of_device(arrays, device: int, devices: int) -> list[jax.Array]:
    def part(array, spec: PartitionSpec):
        for axis, name in enumerate(spec):
            if name:
                array = jnp.split(array, devices, axis)[device]
        return array

    return [part(*each) for each in zip(arrays, CUT)]


def normed(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def expected(arrays, devices: int):
    """In float64: the stream, and each device's part of the next qkv."""
    wide = [np.asarray(array, np.float64) for array in arrays]
    own = [of_device(wide, device, devices) for device in range(devices)]
    _, x, _, norm, _, _, next_norm, _ = own[0]
    x = x + sum(np.asarray(attended) @ np.asarray(out) for attended, _, out, *_ in own)

    def of_mlp(gate_up, down):
        gate, up = np.split(normed(x, norm) @ np.asarray(gate_up), 2, axis=-1)
        return (gate / (1 + np.exp(-gate)) * up) @ np.asarray(down)

    total = x + sum(of_mlp(gate_up, down) for *_, gate_up, down, _, _ in own)
    return total, [normed(total, next_norm) @ np.asarray(qkv) for *_, qkv in own], x


def agrees(found, wanted) -> None:
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 0.006


def parts_of_others(arrays, devices: int):
    """What the first device receives from the others: their parts of both products."""
    *_, x = expected(arrays, devices)
    wide = [np.asarray(array, np.float64) for array in arrays]
    sent = []
    for device in range(1, devices):
        attended, _, out, norm, gate_up, down, *_ = map(
            np.asarray, of_device(wide, device, devices)
        )
        gate, up = np.split(normed(x, norm) @ gate_up, 2, axis=-1)
        sent.append([attended @ out, (gate / (1 + np.exp(-gate)) * up) @ down])
    return jnp.asarray(np.array(sent).swapaxes(0, 1), jnp.bfloat16)


@pytest.mark.parametrize("devices", [2, 4])
def test_what_arrived_is_added_to_both_products(devices):
    arrays = drawn(of_all(SMALL, devices))
    own = of_device(arrays, 0, devices)
    plan = Plan(SMALL, EPS, jnp.bfloat16, 9, Sizes(3, 2), None, Layout(devices, 0))
    inputs = mosaic.arrays_by_name(dict(zip(mosaic.NAMES, own)))
    with no_races() as interpret:
        arrived = {"arrived": parts_of_others(arrays, devices)}
        outputs = mosaic.launch_each(plan, inputs | arrived, interpret)
        jax.block_until_ready(outputs)
    total, qkv, _ = expected(arrays, devices)
    agrees(outputs["total"], total)
    agrees(outputs["next_qkv"], qkv[0])


def inboxes_like(devices: int, shape: ChainShape, mesh: Mesh | None = None, **changes) -> Inboxes:
    def like(size: tuple[int, ...], dtype, spec=EVERYWHERE):
        sharding = NamedSharding(mesh, spec) if mesh else None
        parts = devices if mesh and spec else 1
        whole = (parts * size[0], *size[1:]) if size else ()
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    inboxes = object.__new__(Inboxes)
    fields = {
        "addresses": like((devices, 2), jnp.uint32),
        "device": like((1,), jnp.int32, PartitionSpec(AXIS)),
        "calls": like((), jnp.int32),
        "late": like((BLOCKS,), jnp.int32, PartitionSpec(AXIS)),
        "room": 8 * 64 * shape.hidden * 2,
    }
    for name, field in (fields | changes).items():
        object.__setattr__(inboxes, name, field)
    return inboxes


def spread(call, mesh: Mesh, inboxes: Inboxes):
    """A call, or several, on all devices of a mesh: of the arrays, arrivals and inboxes. Results
    are stacked, so that those of all devices can be compared."""
    counted = jax.tree.map(lambda _: PartitionSpec(), first_arrivals())
    specs = specs_of(inboxes, AXIS)

    def on_each(*given):
        total, qkv, arrivals, inboxes = call(*given)
        return total[None], qkv[None], arrivals, inboxes

    return jax.shard_map(
        on_each,
        mesh=mesh,
        in_specs=(*CUT, counted, specs),
        out_specs=(PartitionSpec(AXIS), PartitionSpec(AXIS), counted, specs),
        check_vma=False,
    )


def two_calls(*given, implementation="mosaic"):
    call = functools.partial(
        exchanging_chain, eps=EPS, axis_name=AXIS, implementation=implementation
    )
    attended, x, *matrices, arrivals, inboxes = given
    weights = ChainWeights(*matrices)
    total, _, arrivals, inboxes = call(attended, x, weights, arrivals, inboxes)
    return call(attended, total, weights, arrivals, inboxes)


@needs_compiler
@pytest.mark.parametrize(("devices", "tokens"), [(2, 16), (2, 64), (4, 64)])
def test_it_compiles_for_gpus_that_are_not_here(devices, tokens, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    h100 = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0", core_count=132
    )
    monkeypatch.setattr(dispatch, "default_device", lambda: h100)
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=TARGETS.joinpath("h100.txtpb").read_text(),
        topology=f"1x1x{devices}",
    )
    mesh = Mesh(np.array(found.devices), (AXIS,))
    shape = dataclasses.replace(QWEN3_8B, tokens=tokens)
    like = lambda size, spec=EVERYWHERE, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        size, dtype, sharding=NamedSharding(mesh, spec)
    )
    given = [like(*each) for each in zip(sizes_of(shape), CUT)]
    arrivals = jax.tree.map(lambda x: like(jnp.shape(x), dtype=jnp.int32), first_arrivals())
    inboxes = inboxes_like(devices, shape, mesh)
    program = compiled(
        jax.jit(spread(two_calls, mesh, inboxes), donate_argnums=9).lower(*given, arrivals, inboxes)
    ).as_text()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', program)) == 2
    for other in ("all-reduce", "all-gather", "partition-id"):
        assert f" {other}" not in program
    assert "uses_xla_collective_metadata = false" in program, "no barrier of jax's before a call"
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    words_come_with_their_numbers(output, devices)


def words_come_with_their_numbers(ptx: str, devices: int) -> None:
    """Every word is stored and loaded together with its number, without any fence for other GPUs,
    and stores to all GPUs come before the first load."""
    kernel = ptx[ptx.index(".visible .entry") :]
    kernel = kernel[: kernel.index("\n}")]
    stores = [found.start() for found in re.finditer(r"st\.relaxed\.sys\.global\.v2\.b64", kernel)]
    loads = [found.start() for found in re.finditer(r"ld\.relaxed\.sys\.global\.v2\.b64", kernel)]
    assert stores and loads and len(stores) == len(loads) and len(stores) % devices == 0
    assert min(stores) < min(loads)
    for other in ("multimem", "fence.sys", "membar.sys", "fence.acq_rel.sys", "fence.sc.sys"):
        assert other not in kernel


class TestItSaysNo:
    def refusal(self, shape: ChainShape, **changes) -> str:
        given = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes_of(shape, 2)]
        arrivals = jax.eval_shape(first_arrivals)
        inboxes = inboxes_like(2, shape, **changes)
        with pytest.raises(NotForThisKernel) as refusal:
            weights = ChainWeights(*given[2:])
            mosaic.check_exchanging(*given[:2], weights, arrivals, inboxes, eps=EPS)
        return str(refusal.value)

    def test_to_tiles_that_do_not_fit_into_an_inbox(self):
        said = self.refusal(of_all(SMALL, 2), room=64 * 1000)
        assert "a numbered message of 49152 bytes; expected at most 16000" in said

    def test_to_parts_that_the_chain_cannot_cut(self):
        said = self.refusal(dataclasses.replace(of_all(SMALL, 2), inner=768))
        assert "inner size 384; expected a multiple of 256" in said


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 16, 40, 64])
@pytest.mark.parametrize("devices", [2, 4])
def test_on_devices(devices, tokens):
    if devices > len(jax.devices()):
        pytest.skip(f"needs {devices} GPUs")
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    shape = dataclasses.replace(QWEN3_8B, tokens=tokens)
    memory = make_memory(mesh, 512 * shape.hidden * 2)
    inboxes = inboxes_of(memory)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    given = [place(*each) for each in zip(drawn(shape), CUT)]

    def many(*given, implementation: str):
        attended, x, *matrices, inboxes = given
        weights = ChainWeights(*matrices)
        begun = jax.lax.psum(inboxes.late.sum(), AXIS)  # no device begins before all are loaded
        x = x + begun.astype(jnp.bfloat16)
        arrivals = first_arrivals()
        for _ in range(10):
            total, qkv, arrivals, inboxes = exchanging_chain(
                attended,
                x,
                weights,
                arrivals,
                inboxes,
                eps=EPS,
                axis_name=AXIS,
                implementation=implementation,
            )
            x = (0.5 * total).astype(total.dtype)
        return total, qkv, arrivals, inboxes

    def run(implementation: str, inboxes):
        call = functools.partial(many, implementation=implementation)
        specs = specs_of(inboxes, AXIS)

        def on_each(*given):
            total, qkv, _, inboxes = call(*given)
            return total[None], qkv[None], inboxes

        over = jax.shard_map(
            on_each,
            mesh=mesh,
            in_specs=(*CUT, specs),
            out_specs=(PartitionSpec(AXIS), PartitionSpec(AXIS), specs),
            check_vma=False,
        )
        return jax.jit(over)

    chained, reference = run("mosaic", inboxes), run("xla", inboxes)
    wanted_total, wanted_qkv, _ = reference(*given, inboxes)
    first, runs = None, 600 if tokens == MOST_TOKENS else 50
    for _ in range(runs):
        total, qkv, inboxes = chained(*given, inboxes)
        total, qkv = np.asarray(total, np.float32), np.asarray(qkv, np.float32)
        assert late_device(np.asarray(inboxes.late)) is None
        for other in total[1:]:
            np.testing.assert_array_equal(total[0], other)
        if first is None:
            first = total, qkv
        np.testing.assert_array_equal(total, first[0])
        np.testing.assert_array_equal(qkv, first[1])
    agrees(total, np.asarray(wanted_total, np.float64))
    agrees(qkv, np.asarray(wanted_qkv, np.float64))
    assert int(inboxes.calls) == 2 * 10 * runs
