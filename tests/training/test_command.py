"""`python -m jaxspec.train` makes drafter folders that can be opened from a target and text."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from small_runs import run_small

from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.engine.setup.load_models import named_target
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen3Config
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.train import main
from jaxspec.training.export import export_target
from jaxspec.training.pretraining.bpe import save_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = Path(__file__).read_text()
FLAGS = {
    "--length": "32",
    "--block-size": "4",
    "--layers": "1",
    "--features": "2",
    "--anchors": "4",
    "--batch-size": "2",
    "--steps": "2",
    "--log-every": "1",
    "--compute": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of five layers, and text."""
    folder = tmp_path_factory.mktemp("train")
    decoder = Decoder(32, 48, 5, 2, 1, 16, 1e-6, Rope(1e4), 512)
    config = Qwen3Config(decoder, 300, True, (0,))
    params = random_params(Qwen3(config), jax.random.key(0))
    export_target(folder / "target", config, params)
    save_tokenizer(train_tokenizer([TEXT], 300), folder / "target", 512)
    (folder / "text.txt").write_text(TEXT)
    return folder


def command(folder: Path, out: Path, data: str = "text.txt", **changes: str) -> list[str]:
    flags = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    paths = ["--target", folder / "target", "--data", folder / data, "--out", out]
    return [*map(str, paths), *(word for flag in flags.items() for word in flag if word)]


def test_trains_exports_and_echoes_its_config(folder, tmp_path, capsys):
    arguments = command(folder, tmp_path, draft_vocab_size="60", on_policy="", shortest_prompt="4")
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert "parameters learn from" in said and "2 a step, for 2 steps, on" in said
    for layout, draft_vocab in ("zlab", None), ("speculators", 60):
        drafter = open_drafter(tmp_path / layout).config
        check_pair(open_target(folder / "target").config, drafter)
        assert drafter.draft_vocab_size == draft_vocab
        assert (drafter.block_size, drafter.target_layer_ids) == (4, (1, 2))
        assert drafter.mask_token_id == 1
    config = json.loads((tmp_path / "train_config.json").read_text())
    assert config["on_policy"] and config["steps"] == 2 and config["learning_rate"] == 6e-4
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2]
    assert {"loss", "acceptance_length", "tokens_per_second"} <= steps[0].keys()
    assert (tmp_path / "training.png").stat().st_size > 1000

    assert main(command(folder, tmp_path, draft_vocab_size="60", steps="3")) == 2
    refused = capsys.readouterr().err.strip().splitlines()[-1]
    assert "on_policy: True -> False" in refused and "steps: 2 -> 3" in refused


def test_a_target_of_the_hub_keeps_its_name(folder, tmp_path, monkeypatch):
    asked = []

    def download(hub_id, **options):
        asked.append((hub_id, options["revision"]))
        return str(folder / "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    arguments = command(folder, tmp_path, revision="main", steps="1")
    arguments[arguments.index("--target") + 1] = "org/model"
    assert main(arguments) == 0
    assert asked == [("org/model", "main")]
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": "lost.txt"}, "no file or folder"),
        ({"features": "3"}, "target has 5 layers, expected at least 6 for 3 features"),
        ({"layer_ids": "4"}, "expected increasing ones from 0 to 3"),
        ({"mask_token_id": "300"}, "mask token 300 is outside"),
        ({"batch_size": "3", "accumulation": "2"}, "batch size 3 does not divide into 2 parts"),
        ({"length": "4"}, "length 4, expected more than a block"),
        ({"draft_vocab_size": "300"}, "draft vocabulary of 300, expected 1 to 299"),
        ({"length": "513"}, "length 513, expected at most the target's context (512)"),
        ({"block_size": "1"}, "block_size is 1, expected at least 2"),
        ({"layers": "0"}, "layers is 0, expected at least 1"),
        ({"features": "0"}, "features is 0, expected at least 1"),
        ({"anchors": "0"}, "anchors is 0, expected at least 1"),
        ({"steps": "0"}, "steps is 0, expected at least 1"),
        ({"batch_size": "0"}, "batch_size is 0, expected at least 1"),
        ({"accumulation": "0"}, "accumulation is 0, expected at least 1"),
        ({"log_every": "0"}, "log_every is 0, expected at least 1"),
        ({"learning_rate": "nan"}, "learning_rate is nan, expected more than 0"),
        ({"warmup": "2"}, "warmup is 2.0, expected a number in [0, 1]"),
        ({"seed": "-1"}, "seed is -1, expected a number from 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_mistakes_are_one_line(folder, tmp_path, capsys, changes, message):
    assert main(command(folder, tmp_path / "out", **changes)) in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_tokenizer(train_tokenizer([TEXT, "and more words " * 9], 340), tmp_path / "target", 512)
    assert main(command(tmp_path, tmp_path / "out", mask_token_id="1")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'text.txt'} has the token id 3")
    assert "embedding has 300 rows (ids 0 to 299)" in line and not (tmp_path / "out").exists()


def test_files_of_a_folder_that_are_no_text_are_counted_in_one_line(folder, tmp_path, capsys):
    """The folder has the target's weights too."""
    (tmp_path / "full").write_text("so that the run ends after it has read the text")
    assert main(command(folder, tmp_path / "full", data="")) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("1 of 6 files are left out: 1 not UTF-8 (")
    assert first.endswith("model.safetensors)") and "cannot write to" in second
    assert main(command(folder, tmp_path / "out", data="target/model.safetensors")) == 1
    assert "model.safetensors is not UTF-8" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_how_to_get_the_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_small(tmp_path)
    said = [line for line in capsys.readouterr().err.splitlines() if "training.png" in line]
    assert len(said) == 1 and "pip install 'jaxspec-decode[plot]'" in said[0]
    assert not (tmp_path / "training.png").exists()
    monkeypatch.undo()
    run_small(tmp_path)
    assert (tmp_path / "training.png").stat().st_size > 1000


def test_without_optax_one_line_names_the_extra(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert main(command(folder, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == "error: training needs optax; install it with pip install 'jaxspec-decode[train]'"
    )


def test_an_output_that_cannot_be_written_is_one_line(folder, tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    assert main(command(folder, tmp_path / "out")) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: cannot write to {tmp_path / 'out'} (")


def test_a_drafter_made_from_a_relative_path_finds_its_target(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(command(Path(), tmp_path, steps="1")) == 0
    monkeypatch.chdir(tmp_path)
    assert Path(named_target(tmp_path / "speculators")).samefile(folder / "target")


@pytest.mark.slow
def test_two_devices_learn_what_one_learns(folder, tmp_path):
    losses = []
    for count in 1, 2:
        out = tmp_path / str(count)
        subprocess.run(
            [sys.executable, "-m", "jaxspec.train", *command(folder, out)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={count} "
                "--xla_backend_optimization_level=0",
            },
            check=True,
            capture_output=True,
        )
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        losses.append([value for line in lines for value in (line["loss"], line["gradient_norm"])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
