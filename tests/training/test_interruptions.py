"""Whatever write fails, and whenever a run is asked to stop, the same command goes on later."""

import signal
from pathlib import Path

import pytest
from small_runs import EVERY_STEP, OPTIONS, losses, run_small
from test_command import command, folder  # noqa: F401

from jaxspec.checkpoint.load import open_drafter
from jaxspec.train import main
from jaxspec.training import loop, whole_files
from jaxspec.training.recipe import Cadence
from jaxspec.training.snapshots import Snapshots
from jaxspec.training.training_log import TrainingLog
from jaxspec.training.whole_files import write_text_whole

SELDOM = Cadence(log_every=1, checkpoint_minutes=60.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of a run without a break."""
    folder = tmp_path_factory.mktemp("whole")  # noqa: F811
    run_small(folder)
    return losses(folder)


def interrupt_before(monkeypatch, owner, name, number, call):
    """Sends a signal right before a function is called for the `call`-th time."""
    original, calls = getattr(owner, name), []

    def interrupted(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            signal.raise_signal(number)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("cadence", [EVERY_STEP, SELDOM], ids=["saved often", "saved at the end"])
@pytest.mark.parametrize(
    "owner, name, number, call",
    [
        (loop, "first_state", signal.SIGINT, 1),
        (Snapshots, "latest_or", signal.SIGINT, 1),
        (loop, "TrainingLog", signal.SIGINT, 1),
        (loop, "to_device", signal.SIGTERM, 1),
        (loop, "to_device", signal.SIGINT, OPTIONS.steps),
        (TrainingLog, "write", signal.SIGTERM, 3),
        (Snapshots, "save", signal.SIGINT, 1),
        (loop, "plot_log", signal.SIGINT, 1),
    ],
)
def test_a_run_that_was_asked_to_stop_can_go_on(
    whole, tmp_path, monkeypatch, owner, name, number, call, cadence
):
    with monkeypatch.context() as change, pytest.raises(KeyboardInterrupt):
        interrupt_before(change, owner, name, number, call)
        run_small(tmp_path, cadence)
    run_small(tmp_path, cadence)
    assert losses(tmp_path) == whole
    assert Snapshots(tmp_path / "states").latest == OPTIONS.steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, error):
    path = tmp_path / "file"
    write_text_whole(path, "old")

    def fail(_):
        raise error

    with monkeypatch.context() as change, pytest.raises(error):
        change.setattr(whole_files.os, "fsync", fail)
        write_text_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text_whole(path, "new")
    assert path.read_text() == "new"


def test_every_file_of_a_command_can_meet_a_full_disk_or_a_stop(folder, tmp_path, monkeypatch):  # noqa: F811
    """The end of its writing fails once for every file, and each time the command goes on."""
    failed: list[str] = []
    replace = Path.replace

    def fail_once(path, other):
        if path.suffix == ".unfinished" and str(path) not in failed:
            failed.append(str(path))
            raise OSError(28, "No space left on device") if len(failed) % 2 else KeyboardInterrupt
        return replace(path, other)

    arguments = command(folder, tmp_path, steps="1")
    with monkeypatch.context() as change:
        change.setattr(Path, "replace", fail_once)
        codes = [main(arguments)]
        while codes[-1] != 0:
            codes.append(main(arguments))
    names = ["train_config.json", "log.jsonl", "sha256.json", "training.png"]
    names += 2 * ["model.safetensors", "config.json"]
    assert [Path(path).stem for path in failed] == names
    assert codes == [1, 130] * (len(names) // 2) + [0]
    assert not list(tmp_path.rglob("*.unfinished"))
    assert [step for step, *_ in losses(tmp_path)] == [1]
    for layout in "zlab", "speculators":
        open_drafter(tmp_path / layout).load("float32")
