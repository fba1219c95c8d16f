"""--draft-quantization reaches the engine of every command that opens a drafter."""

import json
import pathlib

import pytest

from jaxspec import bench, chat, generate, serve
from jaxspec.console.models import NamedModels, in_words
from oracles.more_heads import with_more_heads

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "a"
TARGET = str(GOLDENS / "target")
FP8 = ["--draft-quantization", "fp8"]
COMMANDS = {
    generate: ["--prompt", "class Cache:"],
    chat: [],
    serve: ["--port", "0"],
    bench: ["--num-prompts", "1", "--concurrency", "1"],
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_the_demo_pair_s_sizes_are_refused(command, capsys):
    """As --quantization refuses them."""
    assert command.main([*COMMANDS[command], *FP8]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "hidden_size is 320, expected a multiple of 128" in error
    assert error.endswith("leave draft_quantization out")


@pytest.mark.parametrize(
    ("method", "code", "said"),
    [
        ("dflash", 1, "the drafter for tiny: hidden_size is 64, expected a multiple of 128"),
        ("eagle3", 2, "the drafter for tiny is a drafter of the kind 'eagle3'; expected a DFlash"),
    ],
)
def test_random_drafters_that_cannot_be_in_fp8(method, code, said, capsys):
    shape = ["--model-shape", "tiny", "--num-prompts", "1", "--concurrency", "1"]
    assert bench.main([*shape, "--methods", method, *FP8]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantization", "draft_quantization", "said"),
    [
        (None, "fp8", ", the drafter quantised to FP8"),
        ("fp8", None, ", the target quantised to FP8"),
        ("fp8", "fp8", ", the target and the drafter quantised to FP8"),
        (None, None, "float32"),
    ],
)
def test_what_runs_in_words(quantization, draft_quantization, said):
    named = NamedModels(
        model="a",
        draft_model="b",
        dtype="float32",
        quantization=quantization,
        draft_quantization=draft_quantization,
    )
    assert in_words(named, named).endswith(said)


@pytest.mark.slow
def test_the_text_is_that_of_the_target_alone(tmp_path, capsys):
    draft = str(with_more_heads(GOLDENS / "draft", tmp_path / "draft"))
    case = json.loads((GOLDENS / "trajectories.json").read_text())["trajectories"][1]
    flags = ["--model", TARGET, "--draft-model", draft, "--dtype", "float32", "--ignore-eos"]
    flags += ["--prompt-ids", ",".join(map(str, case["prompt"])), "--max-tokens", "40"]
    result = tmp_path / "out.jsonl"
    assert generate.main([*flags, *FP8, "--max-model-len", "256", "--json", str(result)]) == 0
    assert ", the drafter quantised to FP8" in capsys.readouterr().err
    assert json.loads(result.read_text())["token_ids"] == case["greedy"][:40]
