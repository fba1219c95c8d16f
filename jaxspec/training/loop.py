"""The training loop: runs the steps, logs their metrics and saves their states."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxspec.models.parameters import Params
from jaxspec.training.data import Sequences
from jaxspec.training.in_flight import StepsInFlight
from jaxspec.training.notices import notice
from jaxspec.training.objective import Metrics, to_device
from jaxspec.training.option_limits import check_batch_divides
from jaxspec.training.progress import steps_with_progress
from jaxspec.training.recipe import Cadence, Optimization
from jaxspec.training.snapshots import NoSnapshots, Snapshots
from jaxspec.training.stop_signals import stop_requested
from jaxspec.training.train_step import (
    Objective,
    TrainState,
    divided,
    first_state,
    make_step,
    replicated,
)
from jaxspec.training.training_log import TrainingLog, plot_log


def train(
    objective: Objective,
    params: Params,
    frozen: dict[str, Params],
    sequences: Sequences,
    options: Optimization,
    cadence: Cadence,
    folder: Path,
) -> Params:
    """Trains to the end, from the newest good state in `folder` if there is one.

    Ctrl-C and SIGTERM end the run after the current step and save its state. A run that is limited
    by time saves no states. A loss or a gradient that is not finite ends the run.
    """
    check_batch_divides(options)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        snapshots = opened.enter_context(contextlib.closing(snapshots_of(options, cadence, folder)))
        state = snapshots.latest_or(jax.device_put(first_state(params, options), replicated()))
        in_flight, start = StepsInFlight(), int(state.step)
        length = sequences.tokens.shape[1]
        log = TrainingLog(folder, start, options, cadence, length, in_flight.share_waited)
        opened.enter_context(contextlib.closing(log))
        notice(run_summary(params, sequences, options, start))
        stop = opened.enter_context(stop_requested())
        steps = run_steps(objective, state, frozen, sequences, options)
        for number, state, metrics in steps:
            in_flight.add(metrics)
            log.advance(number, metrics)
            if stop.is_set():
                break
            if snapshots.due():
                log.check()
                snapshots.save(state)
        else:
            log.write_newest()
        log.check()
        snapshots.save(state)
        if stop.is_set():
            raise KeyboardInterrupt
    plot_log(folder)
    return state.params


def snapshots_of(options: Optimization, cadence: Cadence, folder: Path) -> Snapshots | NoSnapshots:
    if options.seconds is not None:
        return NoSnapshots()
    return Snapshots(folder / "states", cadence.checkpoint_minutes)


def run_steps(
    objective: Objective,
    state: TrainState,
    frozen: dict[str, Params],
    sequences: Sequences,
    options: Optimization,
) -> Iterator[tuple[int, TrainState, Metrics]]:
    """Launches the steps after `state`. Yields the number, the new state and the metrics of each.

    A yielded state is no longer valid when the iteration continues, because it is donated to the
    next step.
    """
    step, frozen = make_step(objective, options), jax.device_put(frozen, replicated())
    for number, progress in steps_with_progress(options, int(state.step)):
        batch = sequences.batch_of_step(number - 1, options.batch_size, options.seed)
        state, metrics = step(state, frozen, to_device(batch, divided()), np.float32(progress))
        yield number, state, metrics


def run_summary(params: Params, sequences: Sequences, options: Optimization, start: int) -> str:
    """A one-line description of the run for the terminal, when it begins."""
    millions = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    count, length = sequences.tokens.shape
    duration = f"{options.seconds:g} s" if options.seconds is not None else f"{options.steps} steps"
    resumed = f", from step {start} on" if start else ""
    devices = jax.local_devices()
    return (
        f"{millions:.1f}M parameters learn from {count} sequences of {length} tokens, "
        f"{options.batch_size} a step, for {duration}{resumed}, on "
        f"{len(devices)} x {devices[0].device_kind}"
    )
