"""The command, in a process of its own: it says what it does, answers, and ends on a signal."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import httpx
import pytest
from running_server import GOLDEN, SECONDS

from jaxspec import serve
from jaxspec.console import opening
from jaxspec.console.models import NamedModels
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.errors import LoadError, UsageError
from jaxspec.serving import warming
from jaxspec.serving.listening import bound_socket
from jaxspec.serving.options import ServingOptions

COMMAND = [
    sys.executable, "-m", "jaxspec.serve", "--model", str(GOLDEN / "target"), "--port", "0",
    "--draft-model", str(GOLDEN / "draft"), "--dtype", "float32", "--max-batch", "1",
    "--warm-up", "none",
    "--served-model-name", "tiny", "--max-model-len", "192", "--page-size", "16",
]  # fmt: skip


@pytest.fixture
def process():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXSPEC_API_KEY": "secret"}
    with subprocess.Popen(
        COMMAND, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as one:
        yield one
        one.kill()


def said_until_listening(process) -> tuple[list[str], str]:
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.match(r"listening on (http://\S+)$", line):
            return lines, found[1]
    pytest.fail("".join(lines))


def test_signals_under_load(process):
    """SIGTERM: every request that runs is answered, new ones are not, and the exit code is 0."""
    lines, url = said_until_listening(process)
    assert any("with the drafter" in line for line in lines)
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=url, timeout=SECONDS, headers=headers) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.05)
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        answers: list[httpx.Response] = []
        bodies = [
            {"prompt": f"def f{at}(", "max_tokens": 40, "temperature": 0, "stream": at % 2 == 1,
             "ignore_eos": True}
            for at in range(8)
        ]  # fmt: skip
        post = lambda body: answers.append(client.post("/v1/completions", json=body))
        clients = [threading.Thread(target=post, args=(body,)) for body in bodies]
        for one in clients:
            one.start()
        while client.get("/load").json()["server_load"] < 8 and not answers:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for one in clients:
            one.join(SECONDS)
    assert process.wait(SECONDS) == 0
    assert "Traceback" not in process.stderr.read()
    assert [answer.status_code for answer in answers] == [200] * 8
    for answer in answers:
        if answer.headers["content-type"] == "application/json":
            assert answer.json()["usage"]["completion_tokens"] == 40
        else:
            *_, last, done, _ = answer.text.split("\n\n")
            assert done == "data: [DONE]"
            choice = json.loads(last.removeprefix("data: "))["choices"][0]
            assert choice["finish_reason"] == "length"


def test_an_interrupt_while_it_starts(process):
    time.sleep(1.0)  # whether it has bound its port by then does not matter
    for line in process.stderr:
        if line.startswith("running on"):
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_server_that_ended_while_its_engine_was_opened_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(opening, "say_what_runs", lambda named, say, devices: named)
    monkeypatch.setattr(opening, "opened_engine", lambda *_: object())
    monkeypatch.setattr(warming, "with_template", lambda *_: None)
    monkeypatch.setattr(warming, "warm", lambda *_: None)
    listening = bound_socket("127.0.0.1", 0)
    opened = partial(
        serve._opened, NamedModels(), EngineOptions(), ServingOptions(), listening, "an address"
    )
    opened()
    assert "listening on http://an address" in capsys.readouterr().err
    listening.close()
    opened()
    assert capsys.readouterr().err == ""


def test_what_is_missing_is_named(monkeypatch):
    find = importlib.util.find_spec
    gone = ("uvicorn", "starlette")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest)
    )
    with pytest.raises(LoadError, match=r"starlette and uvicorn.*jaxspec-decode\[serve\]"):
        serve._refuse_missing_packages()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(port=70000), "port is 70000"),
        (dict(max_queued_requests=-1), "max_queued_requests is -1"),
        (dict(shutdown_timeout=-1.0), "shutdown_timeout is -1"),
        (dict(keep_alive_interval=0.0), "keep_alive_interval is 0"),
        (dict(default_max_tokens=0), "default_max_tokens is 0"),
        (dict(api_key=("",)), "api_key is empty"),
    ],
)
def test_wrong_options(options, says):
    with pytest.raises(UsageError, match=says):
        ServingOptions(**options)


def test_a_taken_port_is_said_at_once(capsys):
    from jaxspec.serving.listening import bound_socket

    with bound_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert serve.main(["--host", "no.such.host.invalid"]) == 2
