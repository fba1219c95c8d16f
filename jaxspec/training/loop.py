"""The shell around the step: feeds it, writes down what it says, keeps its states."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxspec.errors import UsageError
from jaxspec.models.parameters import Params
from jaxspec.training.data import Rows
from jaxspec.training.journal import Journal, plot
from jaxspec.training.optimization import Objective, everywhere, first_state, make_step, spread
from jaxspec.training.pace import Lead, turns
from jaxspec.training.recipe import Cadence, Optimization
from jaxspec.training.snapshots import NoSnapshots, Snapshots


def train(
    objective: Objective,
    params: Params,
    frozen: dict[str, Params],
    rows: Rows,
    options: Optimization,
    cadence: Cadence,
    folder: Path,
) -> Params:
    """Trains to the end, from the newest state in `folder` if there is one.

    Ctrl-C and SIGTERM end it after the step they fall into, with that step's state kept. A run by
    the clock keeps none.
    """
    check_division(options)
    timed = options.seconds is not None
    folder.mkdir(parents=True, exist_ok=True)
    snapshots = NoSnapshots() if timed else Snapshots(folder / "states")
    state = jax.device_put(first_state(params, options), everywhere())
    if snapshots.latest is not None:
        state = snapshots.restore(state)
    frozen = jax.device_put(frozen, everywhere())
    step, start = make_step(objective, options), int(state.step)
    journal = Journal(folder, start, None if timed else options.steps, folder.name)
    journal.say(opening(params, rows, options, start))
    saved, lead, done = time.monotonic(), Lead(), start
    with contextlib.closing(snapshots), contextlib.closing(journal), told_to_stop() as stop:
        for done, progress in turns(options, start):
            batch = rows.batch_of_step(done - 1, options.batch_size, options.seed)
            state, metrics = step(state, frozen, spread(batch), np.float32(progress))
            lead.launched(metrics)
            journal.advance()
            if done % cadence.log_every == 0:
                journal.write(done, metrics, batch.tokens.size, lead.share_waited())
            if stop.is_set() or time.monotonic() - saved >= 60 * cadence.checkpoint_minutes:
                snapshots.save(state)
                saved = time.monotonic()
            if stop.is_set():
                raise KeyboardInterrupt
        if done > journal.last_step:
            journal.write(done, metrics, batch.tokens.size, lead.share_waited())
        snapshots.save(state)
    plot(folder)
    return state.params


def opening(params: Params, rows: Rows, options: Optimization, start: int) -> str:
    """What is about to run, for a person."""
    learned = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    length = f"{options.seconds:g} s" if options.seconds is not None else f"{options.steps} steps"
    resumed = f", from step {start} on" if start else ""
    devices = jax.local_devices()
    return (
        f"{learned:.1f}M parameters learn from {len(rows.tokens)} rows of {rows.tokens.shape[1]} "
        f"tokens, {options.batch_size} a step, for {length}{resumed}, on "
        f"{len(devices)} x {devices[0].device_kind}"
    )


@contextlib.contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """Set by the signals that ask a program to end; they do nothing else in the meantime.

    A step takes its state donated: stopping inside of one would leave nothing to keep.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_division(options: Optimization) -> None:
    parts = options.accumulation * jax.local_device_count()
    if options.batch_size % parts:
        raise UsageError(
            f"batch size {options.batch_size} does not divide into {options.accumulation} parts "
            f"on {jax.local_device_count()} devices; expected a multiple of {parts}"
        )
