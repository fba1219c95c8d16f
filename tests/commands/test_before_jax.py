"""What is wrong with a command line is said before jax is imported, which takes seconds."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "jaxspec" / "demo" / "target")
PROMPT = ["--prompt", "a"]
TRAIN = ["--target", TARGET, "--data", "README.md", "--out", "/tmp/out"]
BAD = [
    (["fly"], "no command 'fly'"),
    (["genrate"], "did you mean generate?"),
    (["generate"], "no prompt"),
    (["generate", "--prompt", ""], "the prompt is empty"),
    (["generate", "--prompt-ids", "1,x"], "expected integers"),
    (["generate", "--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
    (["generate", *PROMPT, "--temperature", "-1"], "temperature is -1.0"),
    (["generate", *PROMPT, "--method", "dflsh"], "did you mean dflash?"),
    (["generate", *PROMPT, "--dtype", "fp16"], "invalid choice: 'fp16'"),
    (["generate", *PROMPT, "--driver", "fast"], "invalid choice: 'fast'"),
    (["generate", *PROMPT, "--kernels", "mosaik"], "did you mean mosaic?"),
    (["generate", *PROMPT, "--max-token", "5"], "did you mean --max-tokens?"),
    (["generate", *PROMPT, "--logprobs", "3"], "--logprobs are written to --json"),
    (["generate", *PROMPT, "--logprobs", "30", "--json", "-"], "0 to 20"),
    (["generate", *PROMPT, "--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
    (["generate", *PROMPT, "--model", "./nowhere"], "no such folder: ./nowhere"),
    (["generate", *PROMPT, "--model", "a/b/c"], "no such folder: a/b/c"),
    (["generate", *PROMPT, "--model", "a b"], "neither a folder nor a hub id"),
    (["generate", *PROMPT, "--model", "README.md"], "is a file"),
    (["generate", *PROMPT, "--draft-model", "./nowhere"], "no such folder: ./nowhere"),
    (["generate", *PROMPT, "--model", TARGET, "--revision", "main"], "is a folder"),
    (["generate", *PROMPT, "--model", TARGET, "--method", "dflash"], "no drafter is given"),
    (["generate", *PROMPT, "--model", TARGET, "--block-size", "4"], "no drafter is given"),
    (["generate", *PROMPT, "--system-prompt", "x", "--no-chat-template"], "leave out"),
    (["generate", *PROMPT, "--adaptive", "--exact"], "adaptive and exact"),
    (["generate", *PROMPT, "--profile-steps", "0"], "--profile-steps is 0"),
    (["chat", "--top-p", "2"], "top_p is 2.0"),
    (["chat", "--model", "./nowhere"], "no such folder: ./nowhere"),
    (["chat", "--methd", "none"], "did you mean --method?"),
    (["bench", "--concurrency", "0"], "expected integers of at least 1"),
    (["bench", "--methods", "none,dflsh"], "did you mean 'dflash'?"),
    (["bench", "--methods", "none,none"], "different names"),
    (["bench", "--model-shape", "qwen3-9b"], "did you mean qwen3.5-9b?"),
    (["bench", "--dataset", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    (["bench", "--dataset-format", "csv"], "invalid choice: 'csv'"),
    (["bench", "--page-size", "0"], "page_size is 0"),
    (["bench", "--model", "./nowhere", "--methods", "none"], "no such folder: ./nowhere"),
    (["bench", "--passes", "0"], "--passes is 0"),
    (["serve", "--port", "70000"], "port is 70000"),
    (["serve", "--max-queued-requests", "-1"], "max_queued_requests is -1"),
    (["serve", "--reasoning-parser", "r1"], "invalid choice: 'r1'"),
    (["serve", "--host", "no.such.host.invalid"], "host is 'no.such.host.invalid'"),
    (["serve", "--model", "./nowhere"], "no such folder: ./nowhere"),
    (["convert", "./nowhere", "/tmp/out"], "no such folder: ./nowhere"),
    (["convert", TARGET], "required: DST"),
    (["convert", TARGET, "/tmp/out", "--dtype", "float33"], "did you mean float32?"),
    (["train", *TRAIN, "--steps", "0"], "steps is 0"),
    (["train", *TRAIN, "--target", "./nowhere"], "no such folder: ./nowhere"),
    (["train", *TRAIN, "--data", "nowhere.txt"], "no file or folder nowhere.txt"),
    (["train", *TRAIN, "--weighting", "dpase"], "did you mean dpace?"),
    (["profile", "docs"], "no trace in docs"),
    (["profile", "nowhere"], "no trace in nowhere, which is no folder"),
    (["profile", "docs", "--top", "-1"], "--top is -1"),
]
ANSWERS = """
import contextlib, io, json, sys
from jaxspec.__main__ import main

def answer(arguments):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    return code, err.getvalue(), "jax" in sys.modules

print(json.dumps([answer(arguments) for arguments in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def answers() -> list[tuple[int, str, bool]]:
    """Exit code, stderr, and whether jax was imported, of all of them in one process."""
    commands = json.dumps([arguments for arguments, _ in BAD])
    run = subprocess.run(
        [sys.executable, "-c", ANSWERS, commands], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda n: " ".join(BAD[n][0])[-50:])
def test_it_is_said_before_jax_is_imported(number, answers):
    (_, message), (code, said, imported_jax) = BAD[number], answers[number]
    assert message in said and code in (1, 2)
    assert "error: " in said and "Traceback" not in said
    assert not imported_jax
