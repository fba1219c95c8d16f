"""Runs the steps as compiled programs on the state that they update, with a clock for requests."""

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.acceptance import accept
from jaxspec.engine.programs.store import ProgramStore
from jaxspec.engine.step.compiled import Program, Programs, program_key, programs_for
from jaxspec.engine.step.io import Models, Verified
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.waiting import within
from jaxspec.models.sharding import place_of_uploads
from jaxspec.proposers.device import Drafts, Params

log = logging.getLogger("jaxspec")


@dataclass(frozen=True)
class Waits:
    """How long steps have waited for their programs."""

    count: int = 0
    """Waits that are over, each for one program."""
    seconds: float = 0.0
    """How long these took together."""
    since: float | None = None
    """When the present wait began; None if no step waits now."""


class Clock:
    """A clock in seconds that stands still while a step waits for its program. Only differences
    between its times have a meaning.

    One thread may stop the clock; any thread may read it.
    """

    def __init__(self) -> None:
        self.waits = Waits()
        """Replaced as a whole, so that any thread may read it."""

    def now(self) -> float:
        waits = self.waits
        return (time.perf_counter() if waits.since is None else waits.since) - waits.seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time that passes inside this block does not count."""
        before, since = self.waits, time.perf_counter()
        try:
            self.waits = Waits(before.count, before.seconds, since)
            yield
        finally:
            waited = time.perf_counter() - since
            self.waits = Waits(before.count + 1, before.seconds + waited)


class Device:
    """Models, parameters and the one live state. Every run replaces the state."""

    def __init__(
        self,
        models: Models,
        params: Params,
        state: EngineState,
        store: ProgramStore | None = None,
        step_timeout: float | None = None,
    ):
        self.models = models
        self.params = params
        self.state = state
        self.store = store
        self._in_time = partial(within, step_timeout) if step_timeout else _called
        """Calls a function that may wait for the device, for no longer than a step may take."""
        self.clock = Clock()
        self.observers: list[StepObserver] = []
        self.spacers: Sequence[jax.Array] = ()
        """Arrays that are never read. Between them small arrays find room, so that they do not move
        large ones (`setup/small_pieces.py`)."""
        self.prepared: set[Hashable] = set()
        """Sizes of first steps whose programs were made ready."""
        self._has_told = False
        place = place_of_uploads(models.shards.count)
        self.integers = lru_cache(maxsize=256)(partial(_upload, place=place))
        """Uploads a tuple of integers, padded to a shape. Recent uploads are cached."""

    @cached_property
    def programs(self) -> Programs:
        return programs_for(self.models, self.params, self.state, self.store)

    def use_params(self, params: Params) -> None:
        """Replaces the parameters. If their shapes have changed, programs are made anew."""
        self.params = params
        self.__dict__.pop("programs", None)

    def run(self, step: Step, *inputs: Any, **static: Any) -> Any:
        """Runs a step, replaces the state, and returns the step's other results."""
        for observer in tuple(self.observers):
            observer.program(step, inputs, static)
        program = self.programs.ready(step, inputs, static)
        if program is None:
            program = self._wait_for(self.program(step, *inputs, **static))
        self.state, output = self._in_time(lambda: program(self.params, self.state, *inputs))
        return output

    def has(self, step: Step, *inputs: Any, **static: Any) -> bool:
        """Whether the program that `run` would run for inputs of these shapes is ready."""
        return self.programs.ready(step, inputs, static) is not None

    def _wait_for(self, program: Program) -> jax.stages.Compiled:
        """Makes a program that is not ready."""
        self.tell_of_waiting()
        with self.clock.stopped():
            return program.make()

    def tell_of_waiting(self) -> None:
        """Says in the log, once, that requests wait for programs."""
        if not self._has_told:
            self._has_told = True
            log.info(
                "requests wait while programs are loaded or compiled, when they are first needed; "
                "Engine.warm_up() makes them ready beforehand"
            )

    def program(self, step: Step, *inputs: Any, **static: Any) -> Program:
        """The program that `run` would run for inputs of these shapes."""
        return Program(self.programs, step, inputs, static)

    def accept_on_host(self, drafts: Drafts, verified: Verified) -> Int[Array, " batch"]:
        """Number of accepted drafts, computed on the host by the same rule as on the device."""
        read = self.fetched((drafts.tokens, verified.tokens, verified.num_drafts))
        return jax.device_put(accept(*read))

    def fetched[Results](self, results: Results) -> Results:
        """Waits until programs have run, and returns their results on the host."""
        return self._in_time(lambda: jax.tree.map(np.asarray, results))

    def discard_state(self) -> None:
        """Frees the state's arrays; programs can still be traced for their shapes."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def free(self) -> None:
        """Frees all of the device's memory, except weights that others use as well. Nothing can run
        afterwards."""
        self.discard_state()
        self.params, self.spacers = {}, ()
        self.integers.cache_clear()


def _called[Result](call: Callable[[], Result]) -> Result:
    return call()


@runtime_checkable
class Runs(Protocol):
    """A device, or what takes its place and is given the shapes of inputs instead of inputs."""

    def run(self, step: Step, *inputs: Any, **static: Any) -> Any:
        """Runs a step, and returns its results without the state."""
        ...

    def accept_on_host(self, drafts: Any, verified: Any) -> Any:
        """Number of accepted drafts."""
        ...


class Tracer:
    """Takes the place of a device to list the programs that would run, each once. It runs none."""

    def __init__(self, programs: Programs):
        self.of = programs
        self.programs: dict[Hashable, Program] = {}

    def run(self, step: Step, *inputs: Any, **static: Any) -> Any:
        key = program_key(step, inputs, static)
        if key not in self.programs:
            self.programs[key] = Program(self.of, step, inputs, static)
        _, output = self.programs[key].results
        return output

    def accept_on_host(self, drafts: Drafts, verified: Verified) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(verified.num_drafts.shape, np.int32)


# On a CPU there is nothing to copy. A copy would be ended by a thread of jax that needs the
# interpreter, and that ends the process with SIGABRT if the interpreter has ended.
def begin_copies(results: Sequence[Any]) -> None:
    """Begins to copy results to the host, before anyone asks for them."""
    if jax.default_backend() != "cpu":
        for result in results:
            result.copy_to_host_async()


def _upload(
    values: Sequence[int], shape: tuple[int, ...], padding: int, place: jax.sharding.Sharding | None
) -> Int[Array, "..."]:
    array = np.full(shape, padding, np.int32)
    array.flat[: len(values)] = values
    return jax.device_put(array, place)
