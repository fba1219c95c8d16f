"""How the server starts, is limited, shuts down and fails; with an engine that is not real."""

import threading

import httpx
import pytest
from fake_engine import FakeEngine
from running_server import running, until

from jaxspec.errors import LoadError
from jaxspec.serving.options import ServingOptions
from jaxspec.serving.service import Phase

BODY = {"prompt": [1], "max_tokens": 3}


@pytest.fixture
def fake():
    return FakeEngine()


def opened(fake, **options):
    fake.opening.set()
    return running(fake.open, ServingOptions(**options))


def get(server, path, **settings) -> httpx.Response:
    with server.client() as client:
        return client.get(path, **settings)


def in_background(server, answers: list, body=BODY) -> threading.Thread:
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", body)), daemon=True
    )
    thread.start()
    return thread


def test_it_is_not_healthy_before_it_is_ready(fake):
    with running(fake.open) as server:
        for path in ("/health", "/v1/models", "/metrics"):
            answer = get(server, path)
            assert answer.status_code == 503 and "starting" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
        assert server.post("/v1/completions", BODY).status_code == 503
        assert get(server, "/version").json().keys() == {"version"}
        assert not fake.submitted
        fake.opening.set()
        until(lambda: get(server, "/health").status_code == 200, "not healthy")
        assert get(server, "/health").content == b""
    assert fake.closed


def test_an_engine_that_cannot_be_opened_ends_the_server(fake):
    fake.fails = LoadError("no weights")
    with opened(fake) as server:
        server.thread.join(60)
        assert not server.thread.is_alive()
    assert server.errors == [fake.fails]


def test_an_engine_that_dies_ends_the_server_and_its_requests(fake):
    answers: list[httpx.Response] = []
    with opened(fake) as server:
        clients = [in_background(server, answers, BODY | {"stream": at > 0}) for at in range(2)]
        until(lambda: len(fake.submitted) == 2, "not submitted")
        fake.fails = RuntimeError("the device is gone")
        server.thread.join(60)
        assert not server.thread.is_alive()
        for client in clients:
            client.join(60)
    assert [answer.status_code for answer in answers] == [500, 500]
    assert {a.json()["error"]["message"] for a in answers} == {"the engine ended: RuntimeError"}
    assert all(answer.headers["x-should-retry"] == "false" for answer in answers)
    assert server.errors == [fake.fails] and fake.closed


def test_health_of_a_dead_engine(fake):
    with opened(fake) as server:
        until(lambda: server.service.phase is Phase.READY, "not ready")
        server.service.error, server.service.phase = RuntimeError(), Phase.OVER
        assert get(server, "/health").status_code == 500


def test_it_drains(fake):
    """While requests run, new ones are refused; what is left at the end gets an answer."""
    answers: list[httpx.Response] = []
    with opened(fake) as server:
        client = in_background(server, answers)
        until(lambda: fake.submitted, "not submitted")
        drained = threading.Thread(target=lambda: server.drain(1.0))
        drained.start()
        until(lambda: get(server, "/health").status_code == 503, "still healthy")
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        drained.join(60)
        client.join(60)
    [answer] = answers
    assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]
    assert not server.errors and fake.closed


def test_beyond_the_queue(fake):
    answers: list[httpx.Response] = []
    with opened(fake, max_queued_requests=1) as server:
        until(lambda: server.service.phase is Phase.READY, "not ready")
        for _ in range(3):
            in_background(server, answers)
        until(lambda: len(fake.submitted) == 3, "not submitted")
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert get(server, "/load").json() == {"server_load": 3}
        assert server.service.counts.rejections == 1


def test_silence_is_filled_with_comments(fake):
    with opened(fake, keep_alive_interval=0.05) as server, server.client() as client:
        until(lambda: server.service.phase is Phase.READY, "not ready")
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert [next(lines), next(lines)] == [": keep-alive", ""]
        until(lambda: fake.aborted == [1], "not aborted")


def test_an_error_after_the_stream_has_begun_is_an_event(fake):
    with opened(fake, keep_alive_interval=0.05) as server, server.client() as client:
        until(lambda: server.service.phase is Phase.READY, "not ready")
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            fake.fails = RuntimeError()
            rest = [line for line in lines if line.startswith("data")]
    assert rest[-1] == "data: [DONE]" and '"code": 500' in rest[-2] and len(rest) == 2


KEYED = ["/v1/models", "/tokenizer_info"]
OPEN = ["/health", "/version", "/load", "/openapi.json"]


def test_keys(fake):
    with opened(fake, api_key=("one", "two")) as server:
        until(lambda: server.service.phase is Phase.READY, "not ready")
        for path in KEYED:
            for header in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
                answer = get(server, path, headers=header)
                assert answer.status_code == 401 and answer.headers["x-request-id"]
                assert answer.json()["error"]["type"] == "AuthenticationError"
        for key in ("one", "two"):
            header = {"authorization": f"Bearer {key}"}
            assert get(server, "/v1/models", headers=header).status_code == 200
        assert [get(server, path).status_code for path in OPEN] == [200] * 4
        with server.client() as client:
            assert client.post("/v1/completions", json=BODY).status_code == 401
            assert client.post("/reset_prefix_cache").status_code == 401
            assert client.options("/v1/models").status_code == 405


def test_web_pages(fake):
    page = {"origin": "http://page.example", "access-control-request-method": "POST"}
    with opened(fake, allowed_origins=("http://page.example",), api_key=("k",)) as server:
        with server.client() as client:
            answer = client.options("/v1/completions", headers=page)
            other = client.options("/v1/completions", headers=page | {"origin": "http://x"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("id", ["a" * 129, "ü", "a\tb"])
def test_a_request_id_that_cannot_be_shown_is_replaced(fake, id):
    with opened(fake) as server:
        answer = get(server, "/version", headers={"x-request-id": id.encode()})
        assert len(answer.headers["x-request-id"]) == 32
        kept = get(server, "/version", headers={"x-request-id": "job 7"})
        assert kept.headers["x-request-id"] == "job 7"
