"""What is wrong with a request is said in one form, with the status that vLLM has for it."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import MODEL, SECONDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
BAD = [
    (COMPLETIONS, {}, 400, "prompt is None"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt is []"),
    (COMPLETIONS, {"prompt": ""}, 400, "the prompt is empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "expected a text, a list of texts"),
    (COMPLETIONS, {"prompt": [True]}, 400, "expected a text, a list of texts"),
    (COMPLETIONS, {"prompt": [[1], []]}, 400, "the prompt is empty"),
    (COMPLETIONS, {"prompt": [600]}, 400, "outside the vocabulary of 512 tokens"),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "not valid Unicode"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "or 0 with echo"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4000}, 400, "the context holds 192"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens is '9'"),
    (COMPLETIONS, {"prompt": "a", "model": "no"}, 404, "the model 'no' does not exist"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "from 0 to 20"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p is 0.0"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, "top_k is -2"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, 400, "stop is [1]"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop holds an empty string"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "without stream"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt has 0"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of is 2, but this server"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix is 'b'"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty is 1.1"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 5}}, 400, "logit_bias is"),
    (CHAT, {}, 400, "messages is None"),
    (CHAT, {"messages": []}, 400, "at least one message"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages[0] is"),
    (CHAT, {"messages": ["a"]}, 400, "messages[0] is 'a'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"image_url": ""}]}]}, 400, "content[0]"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens is 0"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, 400, "without logprobs"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools is"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, 400, "response_for"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, 400, "messages"),
    ("/tokenize", {}, 400, "prompt is None"),
    ("/detokenize", {"tokens": [512]}, 400, "below 512"),
    ("/detokenize", {}, 400, "tokens is None"),
]
BODIES = [
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"[]", 400, "expected a JSON object"),
    (b"\xff", 400, "not JSON"),
    (b'{"prompt": NaN}', 400, "NaN is no number"),
    (b'{"prompt": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    (b"[" * 100_000, 400, "nested too deeply"),
]
JSON = {"content-type": "application/json"}


def error_of(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    [(key, error)] = answer.json().items()
    assert key == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and isinstance(error["type"], str)
    return error


@pytest.mark.parametrize(("path", "body", "status", "says"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field(server, path, body, status, says, stream):
    body = body | {"stream": True} if stream and "stream_options" not in body else body
    answer = server.post(path, None, content=json.dumps(body), headers=JSON)
    assert says in error_of(answer, status)["message"]


@pytest.mark.parametrize(("body", "status", "says"), BODIES)
def test_a_body_that_is_no_object(server, body, status, says):
    answer = server.post(COMPLETIONS, None, content=body, headers=JSON)
    assert says in error_of(answer, status)["message"]


def test_the_wrong_type_path_and_method(server):
    with server.client() as client:
        text = client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert "add the header" in error_of(text, 415)["message"]
        assert "'/v2'" in error_of(client.get("/v2"), 404)["message"]
        assert "GET" in error_of(client.get(COMPLETIONS), 405)["message"]
        assert "'x/y'" in error_of(client.get("/v1/models/x/y"), 404)["message"]


def test_a_text_that_is_far_too_long_is_refused_by_its_length(server, monkeypatch):
    """It would take seconds to tokenize."""
    assert server.engine.tokenizer.longest_token == 21  # which is computed once, from the backend
    backend = type("Unused", (), {"__getattr__": lambda self, name: pytest.fail("was tokenized")})
    monkeypatch.setitem(server.engine.tokenizer.__dict__, "backend", backend())
    text = "word " * 200_000
    answer = server.post(COMPLETIONS, {"prompt": text})
    assert "tokens, but the context holds 192" in error_of(answer, 400)["message"]
    chat = [{"role": "user", "content": text}]
    answer = server.post(CHAT, {"messages": chat})
    assert "tokens, but the context holds 192" in error_of(answer, 400)["message"]


def test_values_that_change_nothing_are_accepted(server):
    neutral = dict(
        best_of=1, repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0.0, suffix=None,
        logit_bias={}, min_tokens=0, user="me", store=False, metadata={}, anything=[1],
        skip_special_tokens=True, response_format={"type": "text"},
    )  # fmt: skip
    asked = {"prompt": "a", "max_tokens": 1, "temperature": 0, "seed": None, "stop": None}
    assert server.post(COMPLETIONS, asked | neutral).status_code == 200
    chat = {"messages": MESSAGES, "max_tokens": 1, "temperature": 0, "tools": [], "echo": False}
    assert server.post(CHAT, chat | {"tool_choice": "auto"}).status_code == 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = [
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "echo",
    "stop_token_ids", "logprobs", "top_logprobs", "stream_options", "cache_salt", "best_of",
    "chat_template_kwargs", "add_generation_prompt", "max_completion_tokens", "reasoning_effort",
]  # fmt: skip
TEXTS = st.text(max_size=20)
MESSAGE = st.fixed_dictionaries({"role": TEXTS, "content": TEXTS | st.none() | VALUES})
BODY = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([0, 1, 2]) | VALUES},
    optional={
        "prompt": TEXTS | st.lists(TEXTS, max_size=2) | st.lists(st.integers(0, 600)) | VALUES,
        "messages": st.lists(MESSAGE, max_size=2) | VALUES,
        "stream": st.booleans(),
    },
)


@pytest.fixture(scope="module")
def client(server):
    with server.client() as one:
        yield one


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODY, more=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2), data=st.data())
def test_no_body_breaks_the_server(client, body, more, data):
    """Random bodies get an answer or are refused; they never are the server's fault, and never
    make it hang."""
    path = data.draw(st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]))
    asked = body | more | {"temperature": 0, "model": MODEL}
    answer = client.post(path, content=json.dumps(asked), headers=JSON, timeout=SECONDS)
    assert answer.status_code in (200, 400, 404), (asked, answer.text)
    if answer.status_code != 200:
        error_of(answer, answer.status_code)
