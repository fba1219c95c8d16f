"""A run that is killed and resumed is the same run as one without a break."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import SafetensorError
from training_toys import counting_sequences, toy_objective, toy_params

from jaxspec.errors import LoadError, UsageError
from jaxspec.training.kept_features import reserve
from jaxspec.training.loop import train
from jaxspec.training.recipe import Cadence, Optimization, Recipe
from jaxspec.training.saved_config import save_config
from jaxspec.training.snapshots import Snapshots
from jaxspec.training.train_step import first_state
from jaxspec.training.training_log import TrainingLog
from jaxspec.training.write_errors import writing_to

STEPS = 12
OPTIONS = Optimization(steps=STEPS, batch_size=4, learning_rate=1e-2, compute="float32")
EVERY_STEP = Cadence(log_every=1, checkpoint_minutes=0.0)


def run_toy(folder: Path, cadence: Cadence = EVERY_STEP) -> None:
    objective = toy_objective(Recipe(anchors=4, feature_noise=0.1))
    params, frozen = toy_params(objective)
    train(objective, params, frozen, counting_sequences(), OPTIONS, cadence, folder)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of a run without a break."""
    folder = tmp_path_factory.mktemp("whole")
    run_toy(folder)
    assert len(losses(folder)) == STEPS
    return losses(folder)


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_run(whole, tmp_path):
    kill_in_the_middle(tmp_path)
    latest = Snapshots(tmp_path / "states").latest
    assert latest is not None and 0 < latest < STEPS
    run_toy(tmp_path)
    assert losses(tmp_path) == whole


def test_asked_to_stop_it_keeps_the_step_it_was_in(whole, tmp_path, monkeypatch):
    written = TrainingLog.write

    def stop_at_five(log, step, metrics):
        written(log, step, metrics)
        if step == 5:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingLog, "write", stop_at_five)
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, Cadence(log_every=1, checkpoint_minutes=60.0))
    assert Snapshots(tmp_path / "states").latest == 5
    monkeypatch.undo()
    run_toy(tmp_path)
    assert losses(tmp_path) == whole


def kill_in_the_middle(folder: Path) -> None:
    """Makes the same run in its own process, and kills that once some steps are logged."""
    here = Path(__file__)
    command = f"import pathlib, test_resume as t; t.run_toy(pathlib.Path({str(folder)!r}))"
    path = os.pathsep.join([str(here.parent), str(here.parents[2])])
    log = folder / "log.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def wait_until(happened, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None and time.monotonic() < end, "the run did not get so far"
        time.sleep(0.002)


def test_a_full_disk_keeps_the_last_good_state(tmp_path, monkeypatch):
    params, _ = toy_params(toy_objective(Recipe()))
    first = first_state(params, OPTIONS)
    kept = Snapshots(tmp_path / "states")
    kept.save(first)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    second = jax.tree.map(lambda x: x + 1, first)
    monkeypatch.setattr(kept._manager, "save", full)
    with pytest.raises(LoadError, match="No space left on device.*step 0 is kept"):
        kept.save(second)
    again = Snapshots(tmp_path / "states")
    assert again.latest == 0
    jax.tree.map(np.testing.assert_array_equal, again.latest_or(second).params, params)


def test_what_a_kill_or_a_full_disk_left_half_written_is_removed(tmp_path):
    params, _ = toy_params(toy_objective(Recipe()))
    half = tmp_path / "states" / "3.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    snapshots = Snapshots(tmp_path / "states")
    snapshots.save(first_state(params, OPTIONS))
    snapshots.close()
    assert not half.exists() and Snapshots(tmp_path / "states").latest == 0


def test_a_full_disk_anywhere_is_one_line(tmp_path):
    for error in OSError(28, "No space left on device"), SafetensorError("No space left on device"):
        with pytest.raises(LoadError, match="cannot write to .*No space left on device"):
            with writing_to(tmp_path):
                raise error


def test_kept_features_have_their_room_before_they_are_written(tmp_path):
    np.lib.format.open_memmap(tmp_path / "f.npy", mode="w+", dtype=np.uint16, shape=(1 << 20,))
    before = (tmp_path / "f.npy").stat()
    reserve(tmp_path / "f.npy")
    after = (tmp_path / "f.npy").stat()
    assert after.st_size == before.st_size <= 512 * after.st_blocks
    assert 512 * before.st_blocks < before.st_size


def test_a_run_that_kept_nothing_may_start_again_with_another_config(tmp_path):
    save_config(tmp_path, {"batch_size": 1_000_000})
    save_config(tmp_path, {"batch_size": 8})
    assert json.loads((tmp_path / "train_config.json").read_text()) == {"batch_size": 8}


@pytest.mark.parametrize("kept", ["states/12", "on_policy.npz", "features/labels.npz"])
def test_another_config_is_refused_and_the_difference_shown(tmp_path, kept):
    save_config(tmp_path, {"batch_size": 8, "seed": 0})
    (tmp_path / kept).mkdir(parents=True)
    save_config(tmp_path, {"batch_size": 8, "seed": 0})
    with pytest.raises(UsageError, match="batch_size: 8 -> 16.*another --out"):
        save_config(tmp_path, {"batch_size": 16, "seed": 0})
