"""The op `exchange_norm` over two and four devices, by its reference."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_norm
from pallas_kernels.exchange import exchange_norm, inboxes_of, make_memory, specs_of

EPS, AXIS, PARTS = 1e-6, "shards", 3


def spread(devices: int, addend_dtype: str, calls: int = 1):
    """Runs calls one after the other, and returns every device's results."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    inboxes = inboxes_of(make_memory(mesh, 1 << 12))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 3, 256), "bfloat16")
    addends = jax.random.normal(keys[1], (devices, PARTS, *x.shape), addend_dtype)
    scale = jax.random.normal(keys[2], (256,), "bfloat16")

    def function(x, addends, scale, inboxes):
        total = x
        for _ in range(calls):
            total, normed, inboxes = exchange_norm(
                total, addends[0], scale, inboxes, eps=EPS, axis_name=AXIS
            )
        return total[None], normed[None], inboxes

    specs = specs_of(inboxes, AXIS)
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(), specs),
        out_specs=(P(AXIS), P(AXIS), specs),
        check_vma=False,
    )
    return (x, addends, scale), jax.jit(run)(x, addends, scale, inboxes)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_the_sum_in_the_order_of_the_devices_on_all_of_them(devices, dtype):
    (x, addends, scale), (totals, norms, inboxes) = spread(devices, dtype)
    in_order = lambda parts: functools.reduce(operator.add, [p.astype(jnp.float32) for p in parts])
    product = in_order([in_order(parts).astype(x.dtype) for parts in addends])
    norm = functools.partial(add_norm, eps=EPS, implementation="xla")
    wanted = jax.jit(norm)(x, product[None], scale)
    for found, expected in zip((totals, norms), wanted):
        for device in range(devices):
            np.testing.assert_array_equal(
                found[device].astype(jnp.float32), expected.astype(jnp.float32)
            )
    assert inboxes.calls == 1 and not inboxes.late.any()


def test_calls_are_counted():
    _, (*_, inboxes) = spread(2, "bfloat16", calls=5)
    assert inboxes.calls == 5


def test_every_device_knows_where_all_inboxes_are_and_which_is_its_own():
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    memory = make_memory(mesh, 1 << 12)
    inboxes = inboxes_of(memory)
    words = np.asarray(inboxes.addresses).astype(np.uint64)
    found = [int(low | (high << np.uint64(32))) for low, high in words]
    by_device = {shard.device: shard.data for shard in memory.inboxes.addressable_shards}
    assert found == [by_device[device].unsafe_buffer_pointer() for device in mesh.devices]
    assert len(set(found)) == 4
    assert [shard.data.tolist() for shard in inboxes.device.addressable_shards] == [
        [0], [1], [2], [3],
    ]  # fmt: skip
    assert memory.inboxes[0].nbytes == inboxes.layout.size and not memory.inboxes.any()
