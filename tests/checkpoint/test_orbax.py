"""What `convert` writes opens like its source, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import (
    BF16,
    SPECULATORS,
    TARGET,
    ZLAB,
    speculators_tensors,
    target_tensors,
    write,
    zlab_tensors,
)

from jaxspec import convert
from jaxspec.checkpoint import conversion
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.errors import LoadError

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
SOURCES = {
    "target": (TARGET, target_tensors, open_target),
    "zlab": (ZLAB, zlab_tensors, open_drafter),
    "speculators": (SPECULATORS, speculators_tensors, open_drafter),
}


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
def test_round_trip_is_bit_equal(tmp_path, kind, dtype):
    config, tensors, opened = SOURCES[kind]
    source = write(tmp_path / kind, config, tensors(dtype=dtype))
    assert convert.main([str(source), str(tmp_path / "orbax")]) == 0
    found, expected = opened(tmp_path / "orbax"), opened(source)
    assert found.config == expected.config
    assert_same(found.load(dtype), expected.load(dtype))


@pytest.mark.parametrize(("stored", "asked"), [(np.float32, BF16), (BF16, np.float32)])
def test_loads_in_another_dtype_as_the_source_does(tmp_path, stored, asked):
    source = write(tmp_path / "source", TARGET, target_tensors(dtype=stored))
    conversion.convert(source, tmp_path / "orbax")
    assert_same(open_target(tmp_path / "orbax").load(asked), open_target(source).load(asked))


def test_golden_target_with_its_tokenizer(tmp_path):
    source, destination = GOLDENS / "a" / "target", tmp_path / "deep" / "orbax"
    assert convert.main([str(source), str(destination)]) == 0
    assert_same(open_target(destination).load(jnp.float32), open_target(source).load(jnp.float32))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (destination / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((destination / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_converts_what_it_wrote_itself(tmp_path):
    source = write(tmp_path / "source", ZLAB, zlab_tensors(dtype=BF16))
    conversion.convert(source, tmp_path / "once")
    conversion.convert(tmp_path / "once", tmp_path / "twice")
    assert open_drafter(tmp_path / "twice").exact_dtype == BF16
    assert_same(open_drafter(tmp_path / "twice").load(BF16), open_drafter(source).load(BF16))


def test_dtype_may_be_chosen(tmp_path):
    source = write(tmp_path / "source", TARGET, target_tensors())
    arguments = [str(source), str(tmp_path / "orbax"), "--dtype", "bfloat16"]
    assert convert.main(arguments) == 0
    assert open_target(tmp_path / "orbax").exact_dtype == jnp.bfloat16
    assert_same(open_target(tmp_path / "orbax").load(BF16), open_target(source).load(BF16))


def test_an_empty_destination_is_as_good_as_none(tmp_path):
    source = write(tmp_path / "source", ZLAB, zlab_tensors())
    (tmp_path / "orbax").mkdir()
    assert convert.main([str(source), str(tmp_path / "orbax")]) == 0


@pytest.mark.parametrize("is_file", [True, False])
def test_a_destination_that_is_taken(tmp_path, capsys, is_file):
    source = write(tmp_path / "source", ZLAB, zlab_tensors())
    taken = tmp_path / "taken" if is_file else source
    if is_file:
        taken.write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert convert.main([str(source), str(taken)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith("error: ") and "exists already" in err
    assert before == sorted(path.name for path in tmp_path.rglob("*"))


def test_nothing_is_left_of_a_conversion_that_failed(tmp_path, monkeypatch):
    source = write(tmp_path / "source", ZLAB, zlab_tensors())

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "save", interrupted)
    assert convert.main([str(source), str(tmp_path / "orbax")]) == 130
    assert not (tmp_path / "orbax").exists()


def test_a_bad_source_is_one_line_and_code_1(tmp_path, capsys):
    assert convert.main([str(tmp_path / "none"), str(tmp_path / "orbax")]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: no such folder: {tmp_path / 'none'}; expected a checkpoint folder or a hub id"
    ]
    assert not (tmp_path / "orbax").exists()


def test_debug_shows_where(tmp_path, capsys):
    assert convert.main([str(tmp_path / "none"), str(tmp_path / "orbax"), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def converted(tmp_path, config, tensors):
    conversion.convert(write(tmp_path / "source", config, tensors), tmp_path / "orbax")
    return tmp_path / "orbax"


def rewrite_config(folder, **changed):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"vocab_size": 41}, "embedding/embedding is"),
        ({"num_hidden_layers": 4}, "missing"),
        ({"num_hidden_layers": 2}, "unknown parameter layers_2"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_parameters_are_checked_against_the_config(tmp_path, changed, named):
    folder = converted(tmp_path, TARGET, target_tensors())
    rewrite_config(folder, **changed)
    with pytest.raises(LoadError, match=named):
        open_target(folder)


def test_a_damaged_checkpoint(tmp_path):
    folder = converted(tmp_path, ZLAB, zlab_tensors())
    (folder / "params" / "_METADATA").write_text("{")
    with pytest.raises(LoadError, match="not a whole Orbax checkpoint"):
        open_drafter(folder)


def test_damaged_weights(tmp_path):
    folder = converted(tmp_path, ZLAB, zlab_tensors())
    for path in (folder / "params").rglob("d/*"):
        path.unlink()
    with pytest.raises(LoadError, match="not a whole Orbax checkpoint") as caught:
        open_drafter(folder).load(jnp.float32)
    assert "\n" not in str(caught.value)


def test_a_verifier_beside_the_source_is_still_found(tmp_path):
    folder = converted(tmp_path, SPECULATORS, speculators_tensors())
    assert open_drafter(folder).config.target_path == str((tmp_path / "target").resolve())


def test_help_needs_no_jax():
    code = (
        "import sys, jaxspec.convert\n"
        "try: jaxspec.convert.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'jax' not in sys.modules and 'orbax' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "SRC" in run.stdout and not run.stderr
