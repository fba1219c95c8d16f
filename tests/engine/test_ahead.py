"""Programs that are made in a thread of their own while requests run."""

import contextlib
import dataclasses
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import weakref

import jax
import pytest
from golden_pair import budget, golden_engine, trajectories

from jaxspec.engine.plan.plan import Shapes
from jaxspec.engine.setup import ahead, memory
from jaxspec.engine.setup.ahead import NAME, likeliest_first
from jaxspec.engine.step import compiled

CASES = trajectories()
PROMPTS = [case["prompt"] for case in CASES]
SIZES = dict(max_batch=2, batch_sizes=(1, 2), prefill_shapes=((2, 32),), cache_dir=False)
SECONDS = 60

pytestmark = pytest.mark.usefixtures("compiles_anew")


class Making:
    """Notes which thread makes which program, and can hold or fail those of the background."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made: list[tuple[str, str, str]] = []
        """The thread, the step, the shapes of its inputs and its static arguments."""
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_held = threading.Event()
        self.error: Exception | None = None
        real = compiled.Program.load_or_compile

        def load_or_compile(program: compiled.Program):
            thread = threading.current_thread().name
            self.made.append((thread, program.name, f"{program.inputs} {program.static}"))
            if thread == NAME:
                self.is_held.set()
                assert self.go_on.wait(SECONDS)
                if self.error is not None:
                    raise self.error
            return real(program)

        monkeypatch.setattr(compiled.Program, "load_or_compile", load_or_compile)
        monkeypatch.setattr(compiled, "_SHARED", {})

    @property
    def ahead(self) -> list[tuple[str, str]]:
        return [(step, inputs) for thread, step, inputs in self.made if thread == NAME]


@pytest.fixture
def making(monkeypatch):
    yield (making := Making(monkeypatch))
    making.go_on.set()
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(SECONDS)
            assert not thread.is_alive()


def wait_for(engine) -> None:
    [thread] = [one for one in threading.enumerate() if one.name == NAME] or [None]
    if thread is not None:
        thread.join(SECONDS)
    assert not engine.is_compiling_ahead


def not_ready(engine, draws: bool) -> list[str]:
    programs = engine.programs(draws, only_needed=True)
    return [program.name for program in programs if not program.is_ready]


def test_programs_become_ready_while_a_request_runs(making):
    engine = golden_engine(compile_ahead=True, **SIZES)
    with contextlib.closing(engine.stream(PROMPTS[0], budget(40))) as stream:
        first = next(stream)
        wait_for(engine)
        assert engine.num_running == 1, "the request has ended meanwhile"
        assert not_ready(engine, draws=False) == not_ready(engine, draws=True) == []
        tokens = [*first.token_ids, *(token for event in stream for token in event.token_ids)]
    assert tokens == CASES[0]["dflash_tokens"][:40]
    steps = {step for step, _ in making.ahead}
    assert steps == {"prefill_step", "decode_step"}


def test_no_step_waits_for_a_program_that_was_made_ahead(making):
    engine = golden_engine(compile_ahead=True, **SIZES)
    engine.generate(PROMPTS[0], budget(6))
    wait_for(engine)
    made, waits = len(making.made), engine.loop.device.clock.waits.count
    outputs = engine.generate(PROMPTS[:2], budget(20))
    drawn = engine.generate(PROMPTS[:2], budget(4, temperature=1.0, seed=1))
    assert [list(one.token_ids) for one in outputs] == [c["dflash_tokens"][:20] for c in CASES[:2]]
    assert all(one.error is None for one in drawn)
    assert (len(making.made), engine.loop.device.clock.waits.count) == (made, waits)


def test_a_step_waits_for_the_program_in_the_making_and_does_not_make_it_again(making):
    engine = golden_engine(compile_ahead=True, **SIZES)
    making.go_on.clear()
    stream = engine.stream(PROMPTS[0], budget(60))
    next(stream)
    assert making.is_held.wait(SECONDS), "nothing is made ahead"
    assert [step for step, _ in making.ahead] == ["decode_step"], "not the next batch size first"
    threading.Timer(0.3, making.go_on.set).start()
    other = engine.submit(PROMPTS[1], budget(20))
    while engine.num_running:
        engine.step([other])
    waits = engine.loop.device.clock.waits
    stream.close()
    wait_for(engine)
    assert len({one[1:] for one in making.made}) == len(making.made), "one was made twice"
    assert waits.count >= 1 and waits.seconds > 0.1, "the wait is in the latencies"


def test_what_is_needed_now_is_made_by_the_step_that_needs_it(making):
    """While the thread makes another program."""
    engine = golden_engine(compile_ahead=True, **SIZES)
    making.go_on.clear()
    engine.generate(PROMPTS[0], budget(6))
    assert making.is_held.wait(SECONDS)
    output = engine.generate(PROMPTS[0], budget(6, temperature=1.0, seed=0))
    assert output.error is None and len(making.ahead) == 1


@pytest.mark.parametrize("name", ["close", "interpreter"])
def test_nothing_is_begun_any_more_at_the_end(making, monkeypatch, name):
    engine = golden_engine(compile_ahead=True, **SIZES)
    making.go_on.clear()
    engine.generate(PROMPTS[0], budget(6))
    assert making.is_held.wait(SECONDS)
    [thread] = [one for one in threading.enumerate() if one.name == NAME]
    timer = threading.Timer(0.2, making.go_on.set)
    if name == "interpreter":
        monkeypatch.setattr(threading, "main_thread", lambda: timer)
    timer.start()
    if name == "close":
        engine.close()
        assert making.go_on.is_set() and not thread.is_alive(), "close did not wait"
    else:
        timer.join()
        thread.join(SECONDS)
        monkeypatch.undo()
    assert len(making.ahead) == 1 and not engine.is_compiling_ahead


def test_an_engine_that_nobody_closed_can_be_freed(making):
    engine = golden_engine(compile_ahead=True, **SIZES)
    making.go_on.clear()
    engine.generate(PROMPTS[0], budget(6))
    assert making.is_held.wait(SECONDS)
    device = weakref.ref(engine.loop.device)
    del engine
    gc.collect()
    assert device() is None, "the thread keeps the state's memory"
    making.go_on.set()
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(SECONDS)
    assert len(making.ahead) == 1


def test_a_program_that_cannot_be_made_is_a_line_and_fails_when_it_is_needed(making, caplog):
    engine = golden_engine(compile_ahead=True, **SIZES)
    making.error = MemoryError("no room to compile\nin the pool")
    engine.generate(PROMPTS[0], budget(6))
    wait_for(engine)
    lines = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(lines) == len(making.ahead) > 2
    assert {*lines} == {"a program is made only when it is needed: MemoryError: no room to compile"}
    outputs = engine.generate(PROMPTS[:2], budget(20))
    assert [list(one.token_ids) for one in outputs] == [c["dflash_tokens"][:20] for c in CASES[:2]]


@pytest.mark.parametrize("reason", ["a setting of one thread", "no memory", "the option"])
def test_nothing_is_made_ahead(making, monkeypatch, reason):
    if reason == "no memory":
        monkeypatch.setattr(memory, "free_bytes", lambda *_: 1000)
        monkeypatch.setattr(memory, "pages_that_fit", lambda *_, least: least)
    precision = "highest" if reason == "a setting of one thread" else None
    with jax.default_matmul_precision(precision):
        engine = golden_engine(compile_ahead=reason != "the option", **SIZES)
        engine.generate(PROMPTS[0], budget(6))
        wait_for(engine)
    assert making.ahead == [] and len(making.made) > 2


def test_engines_that_share_programs_make_each_once(making):
    engines = [golden_engine(compile_ahead=True, **SIZES) for _ in range(2)]
    streams = [engine.stream(PROMPTS[0], budget(20)) for engine in engines]
    for stream in streams:
        assert sum(len(event.token_ids) for event in stream) == 20
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(SECONDS)
    assert len({one[1:] for one in making.made}) == len(making.made)
    assert not_ready(engines[1], draws=True) == []


def test_the_order():
    sizes = Shapes((1, 2, 4, 8), ((1, 64), (4, 512)))
    order = [*likeliest_first(sizes, Shapes((2,), ((1, 64),)))]
    prompts = [Shapes((), ((1, 64),)), Shapes((), ((4, 512),))]
    batches = [Shapes((size,), ()) for size in (4, 1, 8)]
    assert order == [Shapes((2,), ((1, 64),)), *batches[:2], *prompts, batches[2]]
    largest = [*likeliest_first(sizes, Shapes((8,), ()))]
    assert [one.batch_sizes for one in largest] == [(8,), (4,), (2,), (), (), (1,)]


def test_steps_that_read_prompts_beside_the_requests_are_made_too():
    plan = golden_engine(max_batch=8, batch_sizes=None, driver="overlapped").plan
    parts = likeliest_first(plan.shapes, Shapes((1,), ()))
    found = [size for one in parts for size in dataclasses.replace(plan, shapes=one).mixed_sizes]
    assert plan.beside and sorted(found) == [*plan.mixed_sizes] == [1, 2, 4, 8]


def test_by_default_a_cpu_makes_nothing_ahead(monkeypatch):
    assert not ahead.wants_ahead(None) and ahead.wants_ahead(True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert ahead.wants_ahead(None) and not ahead.wants_ahead(False)


ENDS = """
import os, signal, sys, threading
from golden_pair import budget, golden_engine, trajectories
engine = golden_engine(compile_ahead=True, max_batch=16, batch_sizes=None, cache_dir=False)
engine.generate(trajectories()[0]["prompt"], budget(6))
print("at work", engine.is_compiling_ahead, flush=True)
if sys.argv[1] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("how", ["normally", "interrupt"])
def test_a_process_may_end_while_a_program_is_made(how):
    """A daemon inside of the compiler would end it with SIGABRT."""
    root = pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, root / "tests" / "engine")))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", ENDS, how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout == "at work True\n"
    if how == "normally":
        assert (run.returncode, run.stderr) == (0, "")
    else:
        assert run.returncode == -signal.SIGINT
        assert run.stderr.rstrip().endswith("KeyboardInterrupt") and "terminate" not in run.stderr
