"""A run is resumed only with the text, the tokenizer and the target that it began with."""

import shutil

import pytest
from safetensors.numpy import load_file, save_file
from test_command import TEXT, command, folder  # noqa: F401

from jaxspec.text.tokenizer import open_tokenizer
from jaxspec.train import main
from jaxspec.training import fingerprints
from jaxspec.training.fingerprints import hash_of_text, hash_of_tokenizer, hash_of_weights
from jaxspec.training.pretraining.bpe import save_tokenizer, train_tokenizer

RUN = {"steps": "1"}


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):  # noqa: F811
    """Inputs, and a run of them that has ended."""
    place = tmp_path_factory.mktemp("run")
    shutil.copytree(folder, place / "inputs")
    assert main(command(place / "inputs", place / "out", **RUN)) == 0
    return place


@pytest.fixture
def copy(run, tmp_path):
    """The same run and its inputs in another place, to be changed."""
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resume(place, capsys):
    code = main(command(place / "inputs", place / "out", **RUN))
    return code, capsys.readouterr().err.strip().splitlines()


def change_text(inputs):
    """As long as before, and of the same name."""
    (inputs / "text.txt").write_text(TEXT.replace("test", "tset"))


def change_tokenizer(inputs):
    save_tokenizer(train_tokenizer([TEXT[::-1]], 300), inputs / "target", 512)


def change_weights(inputs):
    path = inputs / "target" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: -x for name, x in tensors.items()}, path, metadata={"format": "pt"})


def change_config(inputs):
    path = inputs / "target" / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


@pytest.mark.parametrize(
    "change, named",
    [
        (change_text, "the text to train on has changed"),
        (change_tokenizer, "the tokenizer of the target has changed"),
        (change_weights, "the config or the weights of the target has changed"),
        (change_config, "the config or the weights of the target has changed"),
    ],
)
def test_changed_inputs_are_refused_by_name(copy, capsys, change, named):
    change(copy / "inputs")
    code, lines = resume(copy, capsys)
    assert code == 2 and len(lines) == 1
    assert f"({named})" in lines[0] and "or another --out" in lines[0]


def test_inputs_that_moved_are_the_same_run(copy, capsys):
    shutil.move(copy / "inputs", copy / "elsewhere")
    (copy / "elsewhere" / "text.txt").rename(copy / "elsewhere" / "renamed.txt")
    assert main(command(copy / "elsewhere", copy / "out", data="renamed.txt", **RUN)) == 0
    assert "from step 1 on" in capsys.readouterr().err


def test_files_of_a_run_without_its_config_are_refused(copy, capsys):
    (copy / "out" / "train_config.json").unlink()
    code, lines = resume(copy, capsys)
    assert code == 2 and len(lines) == 1 and "no train_config.json" in lines[0]
    assert any((copy / "out" / "states").iterdir())


def test_a_run_of_an_older_version_does_not_say_what_it_learned_from(copy, capsys):
    path = copy / "out" / "train_config.json"
    path.write_text(path.read_text().replace("data_sha256", "data_md5"))
    code, lines = resume(copy, capsys)
    assert code == 2 and "the run does not say what it was" in lines[0]


def test_hashes_of_text_and_tokenizer(folder):  # noqa: F811
    assert hash_of_text(["ab", "c"]) != hash_of_text(["a", "bc"])
    assert hash_of_text(["a", "b"]) != hash_of_text(["b", "a"])
    read = [hash_of_tokenizer(open_tokenizer(folder / "target")) for _ in range(2)]
    assert read[0] == read[1]


def test_large_weights_are_sampled_from_the_first_byte_to_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "WHOLE", 64)
    monkeypatch.setattr(fingerprints, "SAMPLES", 8)
    content = bytes(range(200))
    path = tmp_path / "model-00001-of-00002.safetensors"
    hashes = set()
    for changed in content, b"X" + content[1:], content[:-1] + b"X", content + b"X", content[:60]:
        path.write_bytes(changed)
        hashes |= {hash_of_weights(tmp_path)}
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert len(hashes | {hash_of_weights(tmp_path)}) == 6
