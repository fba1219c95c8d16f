"""The openai package as a client, which checks the type of every field."""

import asyncio
import json
import re
from pathlib import Path

import openai
import pytest
from running_server import MODEL, SECONDS, greedy

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
PROMPT = "def parse("
CHAT = [{"role": "user", "content": "class A:\n    def parse(self, text):"}]
SETTINGS = dict(api_key="none", timeout=SECONDS, max_retries=0)


@pytest.fixture(scope="module")
def strict(server):
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, _strict_response_validation=True, **SETTINGS) as client:
        yield client


def test_models(strict, server):
    [card, alias] = strict.models.list().data
    assert (card.id, alias.id, card.object) == (MODEL, "alias", "model")
    assert strict.models.retrieve("alias").max_model_len == server.engine.max_model_len


def test_a_completion_is_that_of_the_engine(strict, server):
    answer = strict.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0)
    output = server.engine.generate(PROMPT, greedy(9))
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (output.text, output.finish_reason)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.id == f"cmpl-{answer._request_id}" and answer.model == MODEL
    usage, stats = answer.usage, output.stats
    assert usage.prompt_tokens == stats.prompt_tokens and usage.completion_tokens == 9
    assert usage.total_tokens == usage.prompt_tokens + 9
    details, accepted = usage.completion_tokens_details, stats.num_accepted_draft_tokens
    assert details.accepted_prediction_tokens == accepted
    assert details.rejected_prediction_tokens == stats.num_draft_tokens - accepted
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_an_answer_to_a_chat_is_that_of_the_engine(strict, server):
    answer = strict.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=9, temperature=0
    )
    output = server.engine.chat(CHAT, greedy(9))
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", output.text)
    assert choice.finish_reason == output.finish_reason
    assert answer.usage.prompt_tokens == output.stats.prompt_tokens
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


def test_a_stream_of_a_chat(strict, server):
    options = {"include_usage": True}
    with strict.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=30, temperature=0, stream=True,
        stream_options=options,
    ) as stream:  # fmt: skip
        chunks = list(stream)
    output = server.engine.chat(CHAT, greedy(30))
    *deltas, last = chunks
    first = deltas[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == output.text
    reasons = [chunk.choices[0].finish_reason for chunk in deltas]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert last.choices == [] and last.usage.completion_tokens == 30
    assert {(chunk.id, chunk.created, chunk.object) for chunk in chunks} == {
        (last.id, last.created, "chat.completion.chunk")
    }
    # A chunk has the tokens of a step, or of several if the client was slow.
    assert 3 <= len(deltas) <= 1 + 1 + len(output.stats.acceptance_lengths)


def test_log_probabilities_of_a_chat(strict, server):
    asked = dict(
        model=MODEL, messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    whole = strict.chat.completions.create(**asked).choices[0].logprobs.content
    stream = strict.chat.completions.create(**asked, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [token for part in parts if part is not None for token in part.content]
    output = server.engine.chat(CHAT, greedy(6, logprobs=3))
    for tokens in (whole, streamed):
        assert len(tokens) == 6
        for token, id, known in zip(tokens, output.token_ids, output.logprobs, strict=True):
            assert token.logprob == pytest.approx(known[id], abs=1e-4)
            assert bytes(token.bytes) == server.engine.tokenizer.token_bytes(id)
            likeliest = sorted(known.values())[::-1][:3]
            found = [top.logprob for top in token.top_logprobs]
            assert found == pytest.approx(likeliest, abs=1e-4)


def test_no_top_log_probabilities(strict):
    answer = strict.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=2, temperature=0, logprobs=True
    )
    assert [token.top_logprobs for token in answer.choices[0].logprobs.content] == [[], []]


def test_log_probabilities_of_a_completion(strict, server):
    answer = strict.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2
    )
    found, output = (
        answer.choices[0].logprobs,
        server.engine.generate(PROMPT, greedy(5, logprobs=2)),
    )
    own = [known[id] for id, known in zip(output.token_ids, output.logprobs)]
    assert found.token_logprobs == pytest.approx(own, abs=1e-4)
    assert "".join(found.tokens) == output.text
    assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(5)]
    for tops, known in zip(found.top_logprobs, output.logprobs):
        assert max(tops.values()) == pytest.approx(max(known.values()), abs=1e-4)
        assert 1 <= len(tops) <= 3


def test_asynchronous_clients_at_once(server):
    async def both():
        settings = dict(base_url=f"{server.url}/v1", _strict_response_validation=True, **SETTINGS)
        async with openai.AsyncOpenAI(**settings) as client:
            create = client.chat.completions.create
            asked = dict(model=MODEL, messages=CHAT, max_tokens=12, temperature=0)
            whole, stream = await asyncio.gather(create(**asked), create(**asked, stream=True))
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(text)

    whole, streamed = asyncio.run(both())
    assert whole == streamed == server.engine.chat(CHAT, greedy(12)).text


def test_raw_headers(strict):
    raw = strict.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, extra_headers={"X-Request-Id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7" == raw.request_id
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().id == "cmpl-mine-7"


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        (dict(model="other", prompt="a"), openai.NotFoundError, "model"),
        (dict(model=MODEL, prompt="a", temperature=-1), openai.BadRequestError, "temperature"),
        (dict(model=MODEL, prompt="a", n=0), openai.BadRequestError, "n"),
        (dict(model=MODEL, prompt=[9999]), openai.BadRequestError, None),
    ],
)
def test_errors_are_those_of_the_package(strict, asked, kind, param):
    with pytest.raises(kind) as error:
        strict.completions.create(**asked)
    assert error.value.param == param and error.value.body["message"]
    assert error.value.code == str(error.value.status_code)


def test_completions_stream_only_without_the_check(strict, server):
    """The package's types say that a chunk of a completion has a finish_reason and that a prompt's
    first token has a log probability, which no server can fulfil."""
    asked = dict(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0, stream=True)
    with pytest.raises(openai.APIResponseValidationError):
        list(strict.completions.create(**asked))
    with openai.OpenAI(base_url=f"{server.url}/v1", **SETTINGS) as client:
        chunks = list(client.completions.create(**asked))
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == server.engine.generate(PROMPT, greedy(9)).text


def test_what_the_page_says_to_type(server, capsys):
    [body] = re.findall(r"-d '(\{.*?\})'", PAGE)
    answer = server.post("/v1/completions", json.loads(body))
    assert answer.json()["usage"]["completion_tokens"] == 32
    [program] = re.findall(r"^```\n(from openai.*?)^```$", PAGE, re.M | re.S)
    program = program.replace("http://localhost:8000", server.url).replace("Qwen/Qwen3-8B", MODEL)
    bounded = program.replace("stream=True", "stream=True, max_tokens=5, temperature=0")
    exec(compile(bounded, "the Python of the page", "exec"), {})
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    assert capsys.readouterr().out == server.engine.chat(chat, greedy(5)).text
