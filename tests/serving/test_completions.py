"""Completions: choices, lists, echo, log probabilities, stops; all as the engine has them."""

import json

import pytest
from running_server import greedy

PROMPTS = ["def parse(", "class A:"]


def events(text: str) -> list[dict]:
    """The JSON of a stream's events, whose bytes are checked."""
    assert text.endswith("data: [DONE]\n\n")
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def streamed(server, prompt, **fields) -> list[dict]:
    body = {"prompt": prompt, "temperature": 0, "stream": True} | fields
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    return events(answer.text)


def test_lists_of_prompts_and_several_choices(server):
    ids = [list(server.engine.tokenizer.encode(one, add_special_tokens=True)) for one in PROMPTS]
    expected = [one.text for one in server.engine.generate(PROMPTS, greedy(7))]
    for prompts in (PROMPTS, ids):
        answer = server.complete(prompts, max_tokens=7, n=2)
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"] for choice in choices] == [one for one in expected for _ in "ab"]
        usage = answer["usage"]
        assert usage["prompt_tokens"] == sum(map(len, ids))  # each prompt once
        assert usage["completion_tokens"] == 28
    [one] = server.complete(ids[0], max_tokens=7)["choices"]
    assert one["text"] == expected[0]


def test_a_stream_has_the_same_choices(server):
    chunks = streamed(server, PROMPTS, n=2, max_tokens=7, stream_options={"include_usage": True})
    whole = server.complete(PROMPTS, n=2, max_tokens=7)
    *chunks, last = chunks
    texts = {choice: "" for choice in range(4)}
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert chunk["usage"] is None
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(server, PROMPTS[0], max_tokens=9, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 9 == last["usage"]["completion_tokens"]


def test_seeds_give_each_choice_its_own(server):
    asked = dict(max_tokens=6, temperature=1.0, seed=5)
    both = server.complete(PROMPTS[0], n=2, **asked)["choices"]
    alone = [server.complete(PROMPTS[0], **asked | {"seed": seed})["choices"][0] for seed in (5, 6)]
    assert [choice["text"] for choice in both] == [choice["text"] for choice in alone]
    folded = server.complete(PROMPTS[0], **asked | {"seed": 5 - 2**32})["choices"][0]
    assert folded["text"] == alone[0]["text"]


def test_the_default_is_to_sample_sixteen_tokens(server):
    answer = server.post("/v1/completions", {"prompt": PROMPTS[0], "seed": 3}).json()
    expected = server.engine.generate(PROMPTS[0], max_tokens=16, temperature=1.0, seed=3)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == expected.stats.generation_tokens


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(server, include):
    text = server.engine.generate(PROMPTS[0], greedy(24)).text
    stop = text[9:12]
    before = text[: text.index(stop)]
    asked = dict(max_tokens=24, stop=[stop, "never"], include_stop_str_in_output=include)
    [choice] = server.complete(PROMPTS[0], **asked)["choices"]
    expected = (before + stop if include else before, "stop", stop)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == expected
    chunks = [chunk["choices"][0] for chunk in streamed(server, PROMPTS[0], **asked)]
    assert "".join(one["text"] for one in chunks) == expected[0]
    assert chunks[-1]["stop_reason"] == stop


def test_stop_tokens(server):
    ids = server.engine.generate(PROMPTS[0], greedy(9)).token_ids
    [choice] = server.complete(PROMPTS[0], max_tokens=9, stop_token_ids=[ids[4]])["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[4]


def test_streamed_log_probabilities_are_the_whole_ones(server):
    asked = dict(max_tokens=9, logprobs=3)
    [whole] = server.complete(PROMPTS[0], **asked)["choices"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed(server, PROMPTS[0], **asked)]
    joined = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    assert joined.keys() == whole["logprobs"].keys()
    for name in ("tokens", "text_offset"):
        assert joined[name] == whole["logprobs"][name] and len(joined[name]) == 9
    own = whole["logprobs"]["token_logprobs"]
    assert joined["token_logprobs"] == pytest.approx(own, abs=1e-4)
    for found, top in zip(joined["top_logprobs"], whole["logprobs"]["top_logprobs"], strict=True):
        assert found == pytest.approx(top, abs=1e-4)


def test_only_the_own_log_probability(server):
    [choice] = server.complete(PROMPTS[0], max_tokens=3, logprobs=0)["choices"]
    found = choice["logprobs"]
    assert [list(top.values()) for top in found["top_logprobs"]] == [
        [value] for value in found["token_logprobs"]
    ]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(server, max_tokens, stream):
    """What an evaluation asks for to score a text. The engine's own numbers are the reference."""
    asked = dict(max_tokens=max_tokens, logprobs=1, echo=True)
    if stream:
        [chunk] = streamed(server, PROMPTS[0], **asked)
        [choice] = chunk["choices"]
    else:
        [choice] = server.complete(PROMPTS[0], **asked)["choices"]
    params = greedy(max_tokens, logprobs=1, prompt_logprobs=1)
    output = server.engine.generate(PROMPTS[0], params)
    assert choice["text"] == PROMPTS[0] + output.text
    found, ids = choice["logprobs"], (*output.prompt_token_ids, *output.token_ids)
    known = [*output.prompt_logprobs, *output.logprobs]
    assert known[0] is None and found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    own = [one[id] for id, one in zip(ids[1:], known[1:], strict=True)]
    assert found["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
    best = [max(one.values()) for one in known[1:]]
    assert [max(top.values()) for top in found["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"][-1] == len(choice["text"]) - len(found["tokens"][-1])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_log_probabilities(server, stream):
    ids = list(server.engine.tokenizer.encode(PROMPTS[0], add_special_tokens=True))
    expected = PROMPTS[0] + server.engine.generate(PROMPTS[0], greedy(5)).text
    asked = dict(max_tokens=5, echo=True)
    if stream:
        texts = [chunk["choices"][0]["text"] for chunk in streamed(server, ids, **asked)]
        assert "".join(texts) == expected
    else:
        assert server.complete(ids, **asked)["choices"][0]["text"] == expected
    assert server.complete(ids, max_tokens=0, echo=True)["choices"][0]["text"] == PROMPTS[0]


def test_drafting_can_be_left_out(server):
    drafted = server.complete(PROMPTS[0], max_tokens=12)
    plain = server.complete(PROMPTS[0], max_tokens=12, speculate=False)
    assert drafted["choices"] == plain["choices"]
    details = [one["usage"]["completion_tokens_details"] for one in (drafted, plain)]
    assert details[0]["accepted_prediction_tokens"] > 0 == details[1]["rejected_prediction_tokens"]
