"""All orders in which GPUs can run calls of `exchange_norm`, tried one after the other.

What a thread block does is not repeated here: the kernel's own code is run with a stand-in for its
wire, which records all stores, signals, waits and reads. The model then runs these programs on
several GPUs, each at any speed.

A store may arrive any time after its block has gone on, and stores may overtake each other. Only
two things hold them back, as on GPUs: two stores of a GPU to one place arrive in their order, and a
flag that is stored with release arrives after what its block stored before. The model has no
caches, so it cannot show that release and acquire need the scope of the system; the text of the
compiled kernel is searched for that.
"""

import collections
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_chain.partners import EXCHANGES, Partners
from pallas_kernels.dense_chain.plan import EIGHT, Plan, Sizes
from pallas_kernels.dense_chain.shape import ChainShape
from pallas_kernels.exchange import mosaic
from pallas_kernels.exchange import shots as shots_of_kernel
from pallas_kernels.exchange.inboxes import Layout

ROW_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Store:
    receiver: int
    place: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Flag(Store):
    """A store that does not arrive before the earlier stores of its block."""


@dataclasses.dataclass(frozen=True)
class Wait:
    place: int
    number: int
    sender: int


@dataclasses.dataclass(frozen=True)
class Read:
    place: int
    wanted: Any


@dataclasses.dataclass(frozen=True)
class Await(Read):
    """Reads again until the value is there."""


class Recorder:
    """Records what a thread block would do with its wire."""

    registers = dtype = None

    def __init__(self, layout: Layout):
        self.layout, self.noted = layout, []
        self.sent = collections.Counter()

    def send(self, addresses, device, number, row, values, receivers) -> None:
        place = self.layout.message(number, device) + row * ROW_BYTES
        self.sent[row] += 1
        for receiver in receivers:
            self.noted.append(Store(receiver, place, (number, device, row, self.sent[row])))

    def signal(self, addresses, device, number, block, receivers) -> None:
        place = self.layout.flag(device, block)
        self.noted += [Flag(receiver, place, number) for receiver in receivers]

    def wait(self, addresses, device, number, block, late, senders, seconds) -> None:
        self.noted += [Wait(self.layout.flag(sender, block), number, sender) for sender in senders]

    def receive(self, addresses, device, number, row, senders) -> list:
        """What one GPU alone has sent to this one are sums, which are sent second."""
        shot = 1 if len(senders) == self.layout.devices else 2
        for sender in senders:
            place = self.layout.message(number, sender) + row * ROW_BYTES
            self.noted.append(Read(place, (number, sender, row, shot)))
        return [types.SimpleNamespace(astype=lambda dtype: 0.0)]


class NumberedRecorder(Recorder):
    """The same for words with numbers."""

    bytes = ROW_BYTES

    def send(self, addresses, device, number, place, values) -> None:
        place = self.layout.numbered_message(number, device) + place
        for receiver in range(self.layout.devices):
            self.noted.append(Store(receiver, place, (number, device)))

    def receive(self, addresses, device, number, place, late, block) -> list:
        for sender in range(self.layout.devices):
            at = self.layout.numbered_message(number, sender) + place
            self.noted.append(Await(at, (number, sender)))
        return []


def numbered_programs(monkeypatch: pytest.MonkeyPatch, layout: Layout, calls: list[int]) -> list:
    """What `exchanging_chain` does, by GPU, exchange and tile: two tiles on two GPUs, one on three.
    `calls` has the groups of a tile, call by call. All thread blocks meet between the two exchanges
    of a call, as between calls."""

    def program(device: int, before: int, stage: int, groups: int, tile: int) -> tuple:
        recorder = NumberedRecorder(layout)
        monkeypatch.setattr(Partners, "numbered", recorder)
        shape = ChainShape(EIGHT * groups, 512, 512, 512, 0)
        plan = Plan(shape, 1e-6, None, 9, Sizes(3, 2), None, layout)
        refs = {"addresses": None, "device": [device], "exchanges": [before], "late": None}
        partners = Partners(plan, refs, stage, tile, tile)
        for group in range(groups):
            partners.send(group, types.SimpleNamespace(astype=lambda dtype: None))
        for group in range(groups):
            partners.received(group)
        return tuple(recorder.noted)

    return [
        [
            [
                program(device, EXCHANGES * i, stage, groups, tile)
                for tile in range(4 - layout.devices)
            ]
            for i, groups in enumerate(calls)
            for stage in (0, 2)
        ]
        for device in range(layout.devices)
    ]


def programs(
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
    calls: list[int],
    shots: list[int] | None = None,
) -> list:
    """What the kernel does, by GPU, call and thread block. `calls` has the rows of each call, and
    `shots` how many shots each takes: one, unless it is given."""
    monkeypatch.setattr(mosaic, "load", lambda row, registers: np.zeros(1, np.float32))
    monkeypatch.setattr(mosaic, "add_and_norm", lambda *_: None)
    for module in (mosaic, shots_of_kernel):
        monkeypatch.setattr(module, "pl", types.SimpleNamespace(when=now))

    def program(device: int, number: int, rows: int, shots: int, block: int) -> tuple:
        recorder, array, counted = Recorder(layout), jnp.zeros((rows, 1)), {}
        monkeypatch.setattr(mosaic, "lax", types.SimpleNamespace(axis_index=lambda _: block))
        arrays, known = (array, array[None]), ([device], [number - 1], [0] * rows)
        mosaic.one_block(recorder, shots, 1e-6, *arrays, None, None, *known, array, array, counted)
        assert counted == ({0: number} if block == 0 else {})
        return tuple(recorder.noted)

    return [
        [
            [program(device, number, *call, block) for block in range(call[0])]
            for number, call in enumerate(zip(calls, shots or [1] * len(calls)), start=1)
        ]
        for device in range(layout.devices)
    ]


def now(condition):
    return lambda run: run() if condition else None


@dataclasses.dataclass(frozen=True)
class State:
    calls: tuple[int, ...]
    """By GPU, the call that runs. The next call begins when all blocks of this one have ended."""
    places: tuple[tuple[int, ...], ...]
    """By GPU and thread block of that call, how many instructions it has done."""
    memory: tuple[frozenset, ...]
    """By GPU, the places of its inbox and their values."""
    on_their_way: tuple[tuple, ...]
    """Stores that have not arrived, each as its GPU, call, block, place in the program, and store.
    They are sorted, because their order has no meaning and must not make states different."""


class Wrong(Exception):
    """Raised if a GPU reads another value than the one that was meant for it."""


@dataclasses.dataclass(frozen=True)
class Model:
    programs: list
    held_back: bool = True
    """Whether flags wait for the stores before them."""
    equal: bool = False
    """Whether a wait is for exactly a number, instead of for at least this number."""
    filled: bool = False
    """Whether every call begins with filling its GPU's flags with zeros, as jax does it with
    semaphores."""
    stopped: int | None = None
    """A GPU that may stop after any of its instructions, and never go on."""

    def first(self) -> State:
        of_first = [tuple(0 for _ in calls[0]) for calls in self.programs]
        devices = len(self.programs)
        return State((0,) * devices, tuple(of_first), (frozenset(),) * devices, ())

    def final_states(self) -> Iterator[State]:
        """Those of the reachable states in which nothing more happens."""
        seen, open_states = set(), [self.first()]
        while open_states:
            state = open_states.pop()
            if state in seen:
                continue
            seen.add(state)
            after = list(self.after(state))
            if not after:
                yield state
            open_states += after

    def finished(self, state: State, device: int) -> bool:
        return state.calls[device] == len(self.programs[device])

    def after(self, state: State) -> Iterator[State]:
        """Every state that can come next. What no other GPU can notice is done at once."""
        for device, block, instruction in self.next_instructions(state):
            if isinstance(instruction, Store) or self.is_of_itself(instruction, device):
                yield from self.step(state, device, block, instruction)
                return
        for device, block, instruction in self.next_instructions(state):
            yield from self.step(state, device, block, instruction)
        for i in range(len(state.on_their_way)):
            if self.may_arrive(state.on_their_way, i):
                yield self.arrived(state, i)

    def next_instructions(self, state: State) -> Iterator[tuple[int, int, Any]]:
        for device, call in enumerate(state.calls):
            if not self.finished(state, device):
                for block, done in enumerate(state.places[device]):
                    program = self.programs[device][call][block]
                    if done < len(program):
                        yield device, block, program[done]

    def is_of_itself(self, instruction: Any, device: int) -> bool:
        """Whether a GPU reads its own value, from a place where no other GPU stores."""
        return isinstance(instruction, Read) and instruction.wanted[1] == device

    def may_arrive(self, on_their_way: tuple, i: int) -> bool:
        device, call, block, place, store = on_their_way[i]
        for other_device, *other, earlier in on_their_way:
            if other_device != device or other[0] > call:
                continue
            same_place = (store.receiver, store.place) == (earlier.receiver, earlier.place)
            if same_place and other[0] < call:
                return False
            same_block = other[:2] == [call, block]
            if self.held_back and isinstance(store, Flag) and same_block and other[2] < place:
                return False
        return True

    def arrived(self, state: State, i: int) -> State:
        *_, store = state.on_their_way[i]
        rest = state.on_their_way[:i] + state.on_their_way[i + 1 :]
        inbox = dict(state.memory[store.receiver]) | {store.place: store.value}
        memory = replaced(state.memory, store.receiver, frozenset(inbox.items()))
        return dataclasses.replace(state, memory=memory, on_their_way=rest)

    def step(self, state: State, device: int, block: int, instruction: Any) -> Iterator[State]:
        inbox = dict(state.memory[device])
        if isinstance(instruction, Store):
            place = state.places[device][block]
            sent = (device, state.calls[device], block, place, instruction)
            on_their_way = tuple(sorted((*state.on_their_way, sent), key=lambda one: one[:4]))
            state = dataclasses.replace(state, on_their_way=on_their_way)
            if instruction.receiver == device:  # its own inbox: the same threads read it
                state = self.arrived(state, on_their_way.index(sent))
        elif isinstance(instruction, Wait):
            found = inbox.get(instruction.place, 0)
            equal = found == instruction.number
            if not (equal or (found > instruction.number and not self.equal)):
                return
        elif inbox.get(instruction.place) != instruction.wanted:
            if isinstance(instruction, Await):
                return
            raise Wrong(f"{inbox.get(instruction.place)} instead of {instruction.wanted}")
        yield self.gone_on(state, device, block)
        if device == self.stopped:
            yield self.for_ever(state, device)

    def gone_on(self, state: State, device: int, block: int) -> State:
        places = replaced(state.places[device], block, state.places[device][block] + 1)
        call = state.calls[device]
        lengths = tuple(map(len, self.programs[device][call]))
        if places != lengths:
            return dataclasses.replace(state, places=replaced(state.places, device, places))
        blocks = self.programs[device][call + 1] if call + 1 < len(self.programs[device]) else ()
        state = dataclasses.replace(
            state,
            calls=replaced(state.calls, device, call + 1),
            places=replaced(state.places, device, tuple(0 for _ in blocks)),
        )
        return self.with_flags_filled(state, device) if self.filled else state

    def with_flags_filled(self, state: State, device: int) -> State:
        kept = frozenset(item for item in state.memory[device] if isinstance(item[1], tuple))
        return dataclasses.replace(state, memory=replaced(state.memory, device, kept))

    def for_ever(self, state: State, device: int) -> State:
        """The state if the GPU stops and does nothing more."""
        everything = tuple(map(len, self.programs[device][state.calls[device]]))
        return dataclasses.replace(state, places=replaced(state.places, device, everything))


def replaced(values: tuple, i: int, value: Any) -> tuple:
    return (*values[:i], value, *values[i + 1 :])
