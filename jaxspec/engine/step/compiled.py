"""The compiled programs of an engine. Each is made once: loaded from the store, or compiled."""

import functools
import logging
import threading
import time
from collections.abc import Hashable
from concurrent.futures import CancelledError, Future
from typing import Any

import jax

from jaxspec.engine.programs.fingerprint import fingerprint
from jaxspec.engine.programs.store import Kept, ProgramStore
from jaxspec.engine.step import steps
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.mixed import mixed_step
from jaxspec.engine.step.observer import Step
from jaxspec.engine.step.sharded import step_over_shards
from pallas_kernels.kept import settings

log = logging.getLogger("jaxspec")

STATIC: dict[Step, tuple[str, ...]] = {
    steps.admit_step: (),
    steps.copy_step: (),
    steps.prefill_step: ("draws",),
    steps.decode_step: ("drafting", "draws"),
    mixed_step: ("drafting", "draws"),
    steps.draft_step: ("drafting",),
    steps.replace_step: (),
    steps.verify_step: ("draws", "num_tokens"),
    steps.accept_step: (),
    steps.commit_step: (),
}
"""Every step, with its static arguments, which choose the program."""

# The models are static and hashable. The state is donated, so the caller must replace its own by
# the returned one.
JITTED = {
    step: jax.jit(step, static_argnums=0, static_argnames=static, donate_argnums=2)
    for step, static in STATIC.items()
}


_LOWERING = threading.Lock()
"""Held while a program is lowered: lowering is Python, so doing it in parallel gains nothing."""


class Program:
    """One program that an engine may run: a step for inputs of certain shapes."""

    def __init__(
        self,
        programs: "Programs",
        step: Step,
        inputs: tuple[Any, ...],
        static: dict[str, Any],
    ):
        self.step = step
        self.state = programs.state
        """Shapes of the state."""
        self.inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        """Shapes of the inputs besides models, parameters and state."""
        self.static = static
        self._programs = programs

    @property
    def name(self) -> str:
        return self.step.__name__

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        of = self._programs
        if self._is_spread:
            spread = step_over_shards(
                self.step, of.models, of.params, self.state, self.inputs, self.static
            )
            return spread.trace(of.params, self.state, *self.inputs)
        return JITTED[self.step].trace(
            of.models, of.params, self.state, *self.inputs, **self.static
        )

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        with _LOWERING:
            return self.traced.lower()

    @property
    def is_ready(self) -> bool:
        """Whether the program can run at once."""
        return self._programs.has(self)

    def prepare(self) -> None:
        """Traces the program, if it is not ready and the store does not have it."""
        if not self.is_ready and self.kept is None:
            _ = self.traced

    def make(self) -> jax.stages.Compiled:
        """Loads or compiles the program, unless that was done before."""
        return self._programs.make(self)

    @functools.cached_property
    def kept(self) -> Kept | None:
        """The compiled program in the store, if it is there."""
        store, name = self._programs.store, self._fingerprint
        return None if store is None or name is None else store.find(name)

    @property
    def key(self) -> Hashable:
        return program_key(self.step, self.inputs, self.static)

    @property
    def results(self) -> tuple[Any, Any]:
        """Shapes of the next state, and of the results beside it."""
        if (known := self._programs.results_of(self)) is not None:
            return known
        return self.kept.results if self.kept else self._traced_results

    def load_or_compile(self) -> jax.stages.Compiled:
        """Loads or compiles the program; a compiled one is added to the store."""
        store, name = self._programs.store, self._fingerprint
        of_devices = self._programs.models.shards.count
        if store is None or name is None:
            return self._compile()
        make = lambda: (self._compile(), self._traced_results)
        return store.load_or_make(name, self.kept, make, of_devices)

    @property
    def _traced_results(self) -> tuple[Any, Any]:
        results = self.traced.out_info
        return jax.tree.map(_without_devices, results) if self._is_spread else results

    @property
    def _is_spread(self) -> bool:
        return self._programs.models.shards.count > 1

    def _compile(self) -> jax.stages.Compiled:
        begin = time.perf_counter()
        lowered = self.lowered
        middle = time.perf_counter()
        compiled = lowered.compile(compiler_options=self._programs.compiler_options)
        end = time.perf_counter()
        log.info(
            "lowered %s in %.1f s, compiled in %.1f s", self.name, middle - begin, end - middle
        )
        return compiled

    @functools.cached_property
    def _fingerprint(self) -> str | None:
        of = self._programs
        if of.store is None:
            return None
        arguments = of.params, self.state, self.inputs
        return fingerprint(self.name, of.models, self.static, arguments)


class Programs:
    """The programs of engines with equal models, and parameters and states of equal shapes.

    Several threads may ask for programs; each program is made by the thread that asks first.
    """

    def __init__(self, models: Models, params: Any, state: Any, store: ProgramStore | None):
        self.models = models
        self.params = params
        """Shapes of the parameters."""
        self.state = state
        """Shapes of the state between two steps."""
        self.store = store
        self.compiler_options = _compiler_options(store)
        self._ready: dict[Hashable, jax.stages.Compiled] = {}
        self._results: dict[Hashable, tuple[Any, Any]] = {}
        """Shapes of the results of every program that is ready."""
        self._being_made: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()

    def ready(
        self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]
    ) -> jax.stages.Compiled | None:
        """The program that runs this step for inputs of these shapes, if it was made before."""
        return self._ready.get(program_key(step, inputs, static))

    def make(self, program: Program) -> jax.stages.Compiled:
        """Loads or compiles a program, unless that was done before or another thread does it."""
        key = program.key
        while True:
            with self._lock:
                if (ready := self._ready.get(key)) is not None:
                    return ready
                if is_first := key not in self._being_made:
                    self._being_made[key] = Future()
                made = self._being_made[key]
            if is_first:
                return self._make(key, made, program)
            try:
                return made.result()
            except CancelledError:  # the other thread failed or was interrupted
                continue

    def _make(
        self, key: Hashable, made: Future[jax.stages.Compiled], program: Program
    ) -> jax.stages.Compiled:
        try:
            compiled = program.load_or_compile()
            self._results[key] = program.results
            self._ready[key] = compiled
            made.set_result(compiled)
            return compiled
        finally:
            with self._lock:
                del self._being_made[key]
            made.cancel()  # does nothing if there is a result

    def results_of(self, program: Program) -> tuple[Any, Any] | None:
        """Shapes of the results of a program that is ready, which then need not be found or traced;
        None if it is not ready."""
        return self._results.get(program.key)

    def has(self, program: Program) -> bool:
        """Whether the program can run at once."""
        return program.key in self._ready


def program_key(step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> Hashable:
    """What tells the programs of an engine apart: the step, its static arguments and the shapes of
    its inputs. The shapes of the state are the same for all of them."""
    leaves, structure = jax.tree.flatten(inputs)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return step, structure, shapes, tuple(static.items())


def _compiler_options(store: ProgramStore | None) -> dict[str, Any] | None:
    """On a GPU, the folder in which XLA notes which of its kernels were fastest; None elsewhere."""
    if store is None or jax.default_backend() != "gpu":
        return None
    folder = store.files.folder.parent / "autotuned"
    folder.mkdir(exist_ok=True)
    return {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}


_SHARED: dict[Hashable, Programs] = {}


def programs_for(models: Models, params: Any, state: Any, store: ProgramStore | None) -> Programs:
    """The programs for these models and shapes. Engines of a process share them if jax has the same
    settings when they are made."""
    shapes = jax.tree.map(_shape, (params, state))
    leaves, structure = jax.tree.flatten(shapes)
    folder = None if store is None else store.files.folder
    key = models, structure, tuple(map(str, leaves)), folder, str(settings())
    return _SHARED.setdefault(key, Programs(models, shapes[0], shapes[1], store))


def _without_devices(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of a result, which can be written to a file."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    spread = sharding is not None and len(sharding.device_set) > 1
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if spread else None)
