"""The memory that GPUs write into each other, and what a step keeps of it.

    inbox of one GPU    flags      one for each other GPU and thread block: the number of the last
                                   call whose message has arrived
                        messages   turn 0: from GPU 0, from GPU 1, ..
                                   turn 1: from GPU 0, from GPU 1, ..
                        numbered   the same turns again, for messages in which every word of 4 bytes
                        messages   has the number of its call beside it, and needs no flag

A flag only grows. Calls take the two turns one after the other, so a message is written over two
calls later. By then whoever writes has seen its reader's flag of the call between, which the reader
sets only once its call before has ended. So nobody has to say that a message has been read. In two
shots (`shots.py`) it has seen the flag of an owner, which has seen those of all others.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

BLOCKS = 512
"""The most thread blocks of a call. A block waits for the block of its own number on the other
GPUs, so all of them must run at once. An H100 runs so many at once if a thread needs at most 128
registers."""
FLAG_BYTES = 32
"""Bytes between two flags: a sector of the cache, so that no two share one."""
TURNS = 2
NUMBERED = 2
"""How many times the bytes of its words a numbered message has."""
FEWER_TOKENS = 8
"""An inbox has room for numbered messages of an eighth of the tokens of others."""
PATIENCE_S = 10
"""Seconds for which a thread block waits for another GPU, unless it has waited in vain before. GPUs
that work are milliseconds apart; in the first step one may be seconds behind another."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things lie in an inbox, in bytes."""

    devices: int
    room: int
    """Bytes of one message: the products of all tokens of a call, from one GPU."""

    def others(self, device) -> list[Any]:
        """The other GPUs, first the next one, so that not all send to the same GPU at once."""
        return [(device + step) % self.devices for step in range(1, self.devices)]

    def flag(self, sender, block):
        """Where a GPU's thread block says how many of its messages have arrived."""
        return (sender * BLOCKS + block) * FLAG_BYTES

    def message(self, number, sender):
        """Where the message of a call begins. Calls are numbered; their numbers may overflow."""
        return self._flag_bytes + self._place(number & 1, sender) * self.room

    def numbered_message(self, number, sender):
        """Where the numbered message of a call begins."""
        before = self._flag_bytes + TURNS * self.devices * self.room
        return before + self._place(number & 1, sender) * self.numbered_room

    @property
    def numbered_room(self) -> int:
        """Bytes of one numbered message."""
        return self.room * NUMBERED // FEWER_TOKENS

    @property
    def _flag_bytes(self) -> int:
        return self.devices * BLOCKS * FLAG_BYTES

    def _place(self, turn, sender):
        return turn * self.devices + sender

    @property
    def size(self) -> int:
        """Bytes of an inbox."""
        rooms = self.room + self.numbered_room
        return self._flag_bytes + TURNS * self.devices * rooms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inboxes:
    """What one GPU knows of all inboxes. Each call takes the value that the call before returned;
    that also keeps calls in one order, which is the same on all GPUs."""

    addresses: UInt32[Array, "devices words"]
    """Where the GPUs' inboxes lie: the low and the high half of each address."""
    device: Int[Array, " here"]
    """The number of this GPU."""
    calls: Int[Array, ""]
    """Calls so far. The number may overflow."""
    late: Int[Array, " thread_blocks"]
    """For each thread block, 1 + the number of a GPU for which it waited in vain, or 0. Its
    rows are then NaN, from this call on, and it does not wait any more."""
    room: int = dataclasses.field(metadata={"static": True})
    """Bytes that one GPU's message of one call can have."""

    @property
    def layout(self) -> Layout:
        return Layout(self.addresses.shape[0], self.room)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The inboxes themselves, one on each device of a mesh. XLA takes this array for a constant:
    it is never donated and no program returns it, so its addresses stay. It must be kept for as
    long as a program runs that knows them."""

    inboxes: Int[Array, "devices words"]
    mesh: Mesh
    room: int


def make_memory(mesh: Mesh, room: int) -> Memory:
    """Empty inboxes on all devices of a mesh with one axis, which belong to this process."""
    layout = Layout(mesh.size, room)
    if layout.size >= 2**31:
        raise ValueError(f"an inbox of {layout.size} bytes; expected less than 2 GiB")
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError("devices of several processes; expected those of one process")
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    words = layout.size // 4
    zeros = jax.jit(lambda: jnp.zeros((mesh.size, words), jnp.int32), out_shardings=sharding)
    return Memory(jax.block_until_ready(zeros()), mesh, room)


def inboxes_of(memory: Memory) -> Inboxes:
    """What the devices know at first. `device` and `late` have a part on each of them."""
    mesh, axis = memory.mesh, memory.mesh.axis_names[0]
    shards = {shard.device: shard.data for shard in memory.inboxes.addressable_shards}
    places = [shards[device].unsafe_buffer_pointer() for device in mesh.devices.flat]
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    return Inboxes(
        put(halves(places)),
        put(np.arange(mesh.size, dtype=np.int32), axis),
        put(np.int32(0)),
        put(np.zeros(mesh.size * BLOCKS, np.int32), axis),
        memory.room,
    )


OWN = "device", "late"
"""The fields of which each GPU has a part; the others are equal on all of them."""


def specs_of(inboxes: Inboxes, axis_name: str) -> Any:
    """How the fields lie over the devices, for `jax.shard_map`."""
    own, everywhere = PartitionSpec(axis_name), PartitionSpec()
    by_name = lambda path, _: own if path[-1].name in OWN else everywhere
    return jax.tree.map_with_path(by_name, inboxes)


def halves(addresses: Sequence[int]) -> np.ndarray:
    """The low and the high 32 bits of addresses."""
    return np.array([[a & 0xFFFFFFFF, a >> 32] for a in addresses], np.uint32)


def late_device(late: np.ndarray) -> int | None:
    """The first GPU for which another one waited in vain, if there is one."""
    return int(late.max()) - 1 if late.any() else None
