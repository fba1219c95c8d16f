"""The application that the Ray example gives to each replica, under an ASGI server without Ray."""

import socket
import sys
import threading
import time
import types

import httpx
import uvicorn
from example_module import ROOT, example

GOLDENS = ROOT / "tests" / "data" / "goldens" / "a"


def test_a_replica_answers_and_ends():
    module = example("ray_serve")
    app = module.application(str(GOLDENS / "target"), str(GOLDENS / "draft"), max_batch=1)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asked = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120)
        server.should_exit = True
        thread.join(120)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert not thread.is_alive()


def test_what_ray_is_given(monkeypatch):
    """Ray takes a function that makes the application in each replica, and the sizes."""
    seen = {}

    def ingress(make):
        seen["make"] = make
        return lambda replica: replica

    def deployment(**settings):
        seen.update(settings)
        return lambda replica: types.SimpleNamespace(bind=lambda: "bound")

    fake = types.SimpleNamespace(deployment=deployment, ingress=ingress)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(serve=fake))
    module = example("ray_serve")
    monkeypatch.setattr(sys, "argv", ["ray_serve.py", "--replicas", "3", "--max-batch", "4"])
    assert module.deployment(module.parse()) == "bound"
    assert seen["num_replicas"] == 3 and seen["max_ongoing_requests"] == 8
    made = []
    monkeypatch.setattr(module, "application", lambda *model: made.append(model))
    seen["make"]()
    assert made == [(None, None, 4)]
