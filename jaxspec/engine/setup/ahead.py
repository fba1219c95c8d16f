"""Makes programs in a thread of its own while requests run, before a step needs them.

The thread is no daemon, because a process that ends while XLA compiles is aborted. So the
interpreter waits for it, and it begins no program once the main thread has ended. A Ctrl-C during
that wait ends one of our commands at once (`jaxspec.cli`). In another program Python reports the
interrupt and continues to end, and one more Ctrl-C ends the process by its signal.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax

from jaxspec.engine.plan.plan import Plan, Shapes
from jaxspec.engine.setup.pools import has_room_for_trials
from jaxspec.engine.setup.warmup import every_program, for_first_prompts
from jaxspec.engine.step.compiled import Program, Programs
from jaxspec.engine.step.device import Device
from pallas_kernels.kept import lowered_by_workers, settings

log = logging.getLogger("jaxspec")

NAME = "jaxspec programs"
SWITCH_SECONDS = 0.0001
"""How long a step may wait for the interpreter while a program is traced."""
_ONE_AT_A_TIME = threading.Lock()
"""Held by the thread of one engine while it makes a program."""


def wants_ahead(chosen: bool | None) -> bool:
    """The option if it was given; otherwise whether steps run on an accelerator, which leaves the
    CPU to the compiler."""
    return jax.default_backend() != "cpu" if chosen is None else chosen


class Ahead:
    """Makes the programs that requests of an engine may need after their first steps."""

    def __init__(self, plan: Plan, is_wanted: bool):
        self._plan = plan
        # With several processes, XLA needs all of them to make the same programs in the same order.
        self._is_wanted = is_wanted and jax.process_count() == 1
        self._begun: set[Hashable] = set()
        self._work = _Work()
        weakref.finalize(self, self._work.stop)  # in case nobody closes the engine

    def begin(
        self, device: Device, prompts: Sequence[Sequence[int]], draws: bool, scores: bool
    ) -> None:
        """Begins to make the programs for requests of this kind, unless that was done before: those
        for the first steps of these prompts, then those of other sizes, and last the programs for
        requests that draw if these do not, or the other way round."""
        if not self._is_wanted or (kind := (device.programs, draws, scores)) in self._begun:
            return
        self._begun.add(kind)
        programs = device.programs
        first = for_first_prompts(self._plan, prompts)
        sizes = list(likeliest_first(self._plan.shapes, first.shapes))
        plans = [replace(self._plan, shapes=shapes) for shapes in sizes]
        same = (every_program(programs, plan, draws, True, scores) for plan in plans)
        others = (every_program(programs, plan, not draws, True) for plan in plans)
        now = settings()
        whole = self._plan  # not this object, which a thread would keep alive
        # A setting of jax may hold for the caller's thread and not for the one that works.
        possible = lambda: settings() == now and _has_room(programs, whole)
        self._work.add([_if(possible, unit) for unit in (*same, *others)])

    @property
    def is_at_work(self) -> bool:
        return self._work.is_going_on

    def end(self) -> None:
        """Begins no other program, and waits for the one that is being made."""
        self._work.stop()
        self._work.wait()


class _Work:
    """The work of the thread. It has no reference to the engine, which may be freed meanwhile."""

    def __init__(self) -> None:
        self.is_going_on = False
        self._units: list[Iterator[Program]] = []
        """Programs that are left to make, the newest kind of requests first."""
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, units: Sequence[Iterator[Program]]) -> None:
        with self._lock:
            self._units[:0] = units
            if not self.is_going_on and not self._is_over:
                self._thread = threading.Thread(target=self._run, name=NAME, daemon=False)
                self.is_going_on = True
                self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    @property
    def _is_over(self) -> bool:
        return self._is_stopped or not threading.main_thread().is_alive()

    def _run(self) -> None:
        begin, made = time.perf_counter(), 0
        with lowered_by_workers():
            while (unit := self._next_unit()) is not None:
                made += sum(iter(lambda unit=unit: self._make_next(unit), None))
        if made:
            seconds = time.perf_counter() - begin
            log.info("%d programs were made while requests ran, in %.1f s", made, seconds)

    def _next_unit(self) -> Iterator[Program] | None:
        with self._lock:
            self.is_going_on = bool(self._units) and not self._is_over
            return self._units.pop(0) if self.is_going_on else None

    def _make_next(self, programs: Iterator[Program]) -> bool | None:
        """Makes one program. Returns whether it was not ready, or None if none is left."""
        with _ONE_AT_A_TIME, _short_waits():
            try:
                program = None if self._is_over else next(programs, None)
                if program is None:
                    return None
                if is_new := not program.is_ready:
                    program.make()
                return is_new
            except Exception as error:
                if not self._is_over:  # else kernels can no longer be lowered
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                    log.warning("a program is made only when it is needed: %s", reason)
                return False


def likeliest_first(shapes: Shapes, first: Shapes) -> Iterator[Shapes]:
    """These sizes one by one, in the order in which they are likely to be needed after the first:
    when more requests come or some end, then when there are prompts of other lengths."""
    sizes = shapes.batch_sizes
    begun = sizes.index(first.batch_sizes[-1])
    near_first = sorted(sizes, key=lambda size: (abs(sizes.index(size) - begun), -size))
    batches = [Shapes((size,), ()) for size in near_first[1:]]
    prompts = [Shapes((), (shape,)) for shape in shapes.prefill_shapes]
    yield from (first, *batches[:2], *prompts, *batches[2:])


def _if(holds: Callable[[], bool], programs: Iterator[Program]) -> Iterator[Program]:
    if holds():
        yield from programs


def _has_room(programs: Programs, plan: Plan) -> bool:
    return has_room_for_trials(programs.models, programs.params, plan)


@contextmanager
def _short_waits() -> Iterator[None]:
    """Inside the `with` block, a thread that waits for the interpreter gets it sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
