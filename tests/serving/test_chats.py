"""Chats: templates, thinking, parts of messages."""

import dataclasses

import pytest
from running_server import greedy
from test_completions import events

from jaxspec.text.chat import chat_template_of

CHAT = [{"role": "user", "content": "def parse("}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{{ m.reasoning_content or '' }};"
    "{% endfor %}{{ effort or '' }}{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% endif %}{# </think> #}"
)


def ask(server, messages=CHAT, **fields) -> dict:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12} | fields
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokenized(server, messages, **fields) -> str:
    """How the server renders a chat, asked of its own routes."""
    tokens = server.post("/tokenize", {"messages": messages} | fields).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


@pytest.fixture
def template(server):
    """The server with another template."""
    before = server.engine.chat_template

    def use(source: str) -> None:
        server.engine.chat_template = chat_template_of(source, {}, "a test")

    yield use
    server.engine.chat_template = before


def test_several_choices(server):
    answer = ask(server, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    text = server.engine.chat(CHAT, greedy(12)).text
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text, text]


def test_without_a_budget_the_rest_of_the_context(server):
    prompt = [{"role": "user", "content": "x " * 60}]
    answer = ask(server, prompt, max_tokens=None, stop=None)
    total = server.engine.max_model_len
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop" or answer["usage"]["total_tokens"] == total


def test_what_a_template_gets(server, template):
    template(TEMPLATE)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "hm"},
    ]
    expected = "system:be brief|;user:a\nb|;assistant:|hm;"
    assert tokenized(server, messages) == expected
    assert tokenized(server, messages, chat_template_kwargs={"effort": "low"}) == f"{expected}low"
    switched = tokenized(server, messages, chat_template_kwargs={"enable_thinking": True})
    assert switched == f"{expected}<think>\n"


@pytest.mark.parametrize("source", ["{{ raise_exception('no tools here') }}", "{{ messages.x.y }}"])
def test_what_a_template_refuses(server, template, source):
    template(source)
    answer = server.post("/v1/chat/completions", {"messages": CHAT})
    assert answer.status_code == 400
    assert "the chat template in a test" in answer.json()["error"]["message"]


def test_without_a_template_chats_are_refused(server):
    before, server.engine.chat_template = server.engine.chat_template, None
    try:
        answer = server.post("/v1/chat/completions", {"messages": CHAT})
    finally:
        server.engine.chat_template = before
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_thinking_is_apart_from_the_answer(server, template):
    """The tiny model does not think, but a template that opens its thinking makes all thoughts."""
    template(TEMPLATE)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(server, **thinking)
    [choice] = answer["choices"]
    message = choice["message"]
    assert message["content"] == "" and message["reasoning"] == message["reasoning_content"] != ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 12, "stream": True} | thinking
    chunks = events(server.post("/v1/chat/completions", body).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert all(delta.get("content", "") == "" for delta in deltas)
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    hidden = ask(server, include_reasoning=False, **thinking)["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": ""}
    plain = ask(server, chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert plain["content"] and "reasoning" not in plain


def test_the_options_decide_whether_thinking_is_split(server, template):
    template(TEMPLATE)
    before = server.service.options
    server.service.options = dataclasses.replace(before, reasoning_parser="none")
    try:
        answer = ask(server, chat_template_kwargs={"enable_thinking": True})
    finally:
        server.service.options = before
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
