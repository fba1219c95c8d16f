"""A damaged file in the folder of a run is noticed and said in one line; what can be is used."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from small_runs import STEPS, losses, run_small
from training_toys import counting_sequences, toy_objective

from jaxspec.errors import LoadError, UsageError
from jaxspec.training import kept_features
from jaxspec.training.data import Sequences
from jaxspec.training.kept_features import with_kept_features
from jaxspec.training.kept_rows import kept_sequences, save_arrays
from jaxspec.training.recipe import Recipe
from jaxspec.training.saved_config import save_config
from jaxspec.training.snapshots import Snapshots


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def remove(path):
    path.unlink()


def write_json(path):
    path.write_text('{"a": [1]}')


DAMAGES = [cut_in_half, empty, change_a_byte, remove, write_json]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a break; it has kept the states of its last two steps."""
    folder = tmp_path_factory.mktemp("whole")
    run_small(folder)
    assert {path.name for path in (folder / "states").iterdir()} == {"5", "6"}
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def weights(state):
    """The largest file of a state, which holds its numbers."""
    return max((p for p in state.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def metadata(state):
    return state / "default" / "_METADATA"


@pytest.mark.parametrize("file_of", [weights, metadata], ids=["weights", "metadata"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_good_state_is_used_if_a_newer_one_is_damaged(
    whole, copy, capfd, damage, file_of
):
    damage(file_of(copy / "states" / "6"))
    run_small(copy)
    assert losses(copy) == losses(whole)
    error = capfd.readouterr().err
    said = [line for line in error.splitlines() if "damaged" in line]
    assert len(said) == 1 and "state of step 6 is damaged" in said[0]
    assert "goes on from step 5" in said[0] and "Traceback" not in error
    assert (copy / "damaged_state_6").is_dir() and Snapshots(copy / "states").latest == STEPS


def test_a_state_without_checksums_is_used_unless_orbax_cannot_read_it(whole, copy, capfd):
    """A kill can come between the state and its checksums."""
    for step in "5", "6":
        (copy / "states" / step / "sha256.json").unlink()
    run_small(copy)
    assert "damaged" not in capfd.readouterr().err
    cut_in_half(metadata(copy / "states" / "6"))
    run_small(copy)
    assert "goes on from step 5" in capfd.readouterr().err
    assert losses(copy) == losses(whole)


def test_if_every_state_is_damaged_the_run_is_refused_and_they_stay(copy):
    for step in "5", "6":
        empty(weights(copy / "states" / step))
    with pytest.raises(LoadError, match="no state in .*step 6: .*step 5: .*remove") as caught:
        run_small(copy)
    assert "\n" not in str(caught.value)
    assert {path.name for path in (copy / "states").iterdir()} == {"5", "6"}


@pytest.mark.parametrize(
    "wrong, damaged",
    [(b"not json\n", 1), (b"\xff\xfe\x00\n", 1), (b"[1]\n{}\n", 2), (b'{"step": "a"}\n', 1)]
    + [(b"[" * 100_000 + b"\n", 1), (b'{"step": 1', 0)],
    ids=["text", "binary", "other json", "no number", "deep", "cut off"],
)
def test_damaged_lines_of_the_log_are_removed(whole, copy, capfd, wrong, damaged):
    with (copy / "log.jsonl").open("ab") as file:
        file.write(wrong)
    run_small(copy)
    assert losses(copy) == losses(whole)
    said = [line for line in capfd.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == (damaged > 0) and all(f"has {damaged} damaged lines" in x for x in said)


def test_a_log_without_any_good_line_is_begun_anew(copy):
    (copy / "log.jsonl").write_bytes(bytes(1000))
    run_small(copy)
    assert losses(copy) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_config_is_refused(copy, content):
    (copy / "train_config.json").write_bytes(content)
    with pytest.raises((LoadError, UsageError), match="train_config.json.*another --out"):
        save_config(copy, {"batch_size": 8})


ROWS = Sequences(np.arange(6, dtype=np.int32).reshape(2, 3), np.array([1, 0], np.int32))


def another_shape(path):
    save_arrays(path, "hash", tokens=ROWS.tokens[:, :2], first=ROWS.first)


def numbers_that_are_no_ids(path):
    save_arrays(path, "hash", tokens=ROWS.tokens / 2, first=ROWS.first)


def ids_outside(path):
    save_arrays(path, "hash", tokens=ROWS.tokens + 1, first=ROWS.first)


def starts_outside(path):
    save_arrays(path, "hash", tokens=ROWS.tokens, first=ROWS.first + 2)


def other_data(path):
    save_arrays(path, "other", tokens=ROWS.tokens, first=ROWS.first)


def without_a_hash(path):
    np.savez(path, tokens=ROWS.tokens, first=ROWS.first)


WRONG_ROWS = [another_shape, numbers_that_are_no_ids, ids_outside, starts_outside, other_data]


@pytest.mark.parametrize("damage", [*DAMAGES, *WRONG_ROWS, without_a_hash])
def test_damaged_rows_are_computed_again(tmp_path, capsys, damage):
    path, made = tmp_path / "on_policy.npz", []

    def make():
        made.append(ROWS)
        return ROWS

    def rows():
        return kept_sequences(path, "hash", (2, 3), 6, make)

    rows()
    damage(path)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, vars(rows()), vars(ROWS))
    assert len(made) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (damage is not remove)
    assert all(line.endswith("its sequences are computed again") for line in lines)


OBJECTIVE = toy_objective(Recipe())
TEXT = counting_sequences(count=3, length=8)


@pytest.fixture
def computed(monkeypatch):
    """The paths to which features were computed, which here are all ones, as are the labels."""
    paths = []

    def compute(objective, params, sequences, batch_size, path):
        paths.append(path)
        shape = sequences.tokens.shape
        features = kept_features.features_file(path, objective, *shape)
        features[:] = np.float32(1).view(np.uint32)
        return np.ones(shape, np.int32)

    monkeypatch.setattr(kept_features, "compute_features", compute)
    return paths


def features_of(folder, sequences=TEXT, made_of="hash"):
    return with_kept_features(OBJECTIVE, {}, sequences, 2, folder, made_of)


@pytest.mark.parametrize(
    "name, damage",
    [("labels.npz", damage) for damage in (*DAMAGES, other_data)]
    + [("features.npy", damage) for damage in (cut_in_half, empty, remove, write_json)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damaged_features_are_computed_again(tmp_path, capsys, computed, name, damage):
    features_of(tmp_path)
    damage(tmp_path / name)
    for _ in range(2):
        kept = features_of(tmp_path)
        assert np.all(kept.features == 1) and np.all(kept.labels == 1)
    assert len(computed) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == ((name, damage) != ("labels.npz", remove))
    assert all(line.endswith("the features are computed again") for line in lines)


def test_features_of_other_sequences_or_another_run_are_not_used(tmp_path, computed):
    features_of(tmp_path)
    features_of(tmp_path, replace(TEXT, tokens=TEXT.tokens[::-1]))
    features_of(tmp_path, made_of="another")
    assert len(computed) == 3


def test_features_without_labels_are_not_complete(tmp_path, computed, monkeypatch):
    """A kill can come between the two files, also while both are computed again."""
    features_of(tmp_path)
    empty(tmp_path / "features.npy")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as change, pytest.raises(KeyboardInterrupt):
        change.setattr(kept_features, "compute_features", killed)
        features_of(tmp_path)
    assert not (tmp_path / "labels.npz").exists()
    features_of(tmp_path)
    assert len(computed) == 2
