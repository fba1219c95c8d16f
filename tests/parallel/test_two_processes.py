"""Engines of two processes, each with one device, that run the same steps together."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from jaxspec import generate

ROOT = pathlib.Path(__file__).parents[2]
WORKER = pathlib.Path(__file__).with_name("one_of_two_processes.py")


def started(*arguments: object) -> subprocess.Popen:
    flags = "--xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def workers(*options: dict) -> list[subprocess.Popen]:
    """Two processes that run an engine with each of these options, one after the other."""
    port = free_port()
    return [started(WORKER, port, process, json.dumps(options)) for process in range(2)]


def told_by(process: subprocess.Popen, seconds: float) -> tuple[str, str]:
    """What a process printed, once it has ended."""
    try:
        return process.communicate(timeout=seconds)
    finally:
        process.kill()


@pytest.mark.slow
def test_both_processes_say_the_same():
    """One pair of processes runs all engines, which share models and compiled programs."""
    options = {}, {"driver": "lockstep"}, {"adaptive": True}, {"method": "ngram"}
    processes, said = workers(*options), []
    for process in processes:
        out, err = told_by(process, 600)
        assert process.returncode == 0, err
        said.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    assert said[0] == said[1] and [len(tokens) for tokens in said[0]] == [4, 4, 4, 4]


@pytest.mark.slow
def test_if_one_process_dies_the_other_ends_within_seconds():
    first, second = workers({"die": 3})
    told_by(second, 300)
    since = time.monotonic()
    _, err = told_by(first, 60)
    assert second.returncode == 9 and first.returncode not in (0, -9)
    assert "another task died" in err or "Connection closed by peer" in err
    assert time.monotonic() - since < 30


@pytest.mark.slow
def test_if_one_process_stops_answering_requests_of_the_other_end_with_our_error():
    first, second = workers({"stop": 3, "step_timeout": 4})
    try:
        _, err = told_by(first, 300)
    finally:
        second.kill()
        second.communicate()
    assert first.returncode not in (0, -9)
    assert "RequestFailed" in err and "step_timeout, which is 4 s" in err


@pytest.mark.slow
def test_the_command_prints_in_the_first_process_what_one_process_prints(capsys):
    target, draft = (ROOT / "tests/data/goldens/a" / name for name in ("target", "draft"))
    prompts = ["--prompt-ids", "1,2,3,4,5,6,7", "--prompt-ids", "300,301"]
    flags = ["--model", str(target), "--draft-model", str(draft), *prompts]
    flags += ["--dtype", "float32", "--max-tokens", "20", "--json", "-", "--cache-dir", ""]
    assert generate.main(flags) == 0
    alone = capsys.readouterr().out
    command = ["-m", "jaxspec.generate", *flags]
    together = ["--tensor-parallel-size", "2", "--num-processes", "2"]
    together += ["--coordinator", f"localhost:{free_port()}", "--process-id"]
    first, second = (started(*command, *together, process) for process in range(2))
    outputs = [told_by(process, 300) for process in (first, second)]
    assert first.returncode == second.returncode == 0, outputs
    ours = lambda out: [line for line in out.splitlines() if not line.startswith("[Gloo]")]
    tokens = lambda out: [json.loads(line)["token_ids"] for line in ours(out)]
    assert tokens(outputs[0][0]) == tokens(alone) and len(tokens(alone)) == 2
    assert ours(outputs[1][0]) == []
