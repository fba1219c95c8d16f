"""Where a request ends: budget, stop ids and stop strings, wherever in a span they fall."""

import jaxtyping
import pytest
from golden_pair import budget, golden_engine, opened, trajectories

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import UsageError

PROMPTS = (1, 3, 10)
TOKENS = 48


def decode(tokens) -> str:
    return opened().tokenizer.decode(tokens)


def cut_at_string(tokens: list[int], stops: list[str]) -> tuple[list[int], str, str | None]:
    """The tokens up to the one that completes a stop string, the text before it, and which."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        found = [stop for stop in stops if stop in text]
        if found:
            first = min(found, key=lambda stop: (text.index(stop) + len(stop), text.index(stop)))
            return tokens[:count], text[: text.index(first)], first
    return tokens, decode(tokens), None


@pytest.mark.parametrize("place", PROMPTS)
def test_stop_ids_cut_at_their_first_occurrence(place):
    case, engine = trajectories()[place], golden_engine()
    greedy = case["greedy"][:TOKENS]
    stops = sorted({greedy.index(token) for token in greedy})[::4]
    params = [budget(TOKENS, stop_token_ids=[greedy[i], 511]) for i in stops]
    for i, output in zip(stops, engine.generate([case["prompt"]] * len(stops), params)):
        assert list(output.token_ids) == greedy[: i + 1]
        assert output.finish_reason == "stop" and output.stop_reason == greedy[i]
        assert output.text == decode(greedy[:i]), "the ending token is no text"
        steps = output.stats.acceptance_lengths
        assert list(steps) == case["acceptance_lengths"][: len(steps)]
        assert sum(steps) + 1 >= i + 1, "counted before the cut"
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize("place", PROMPTS)
def test_stop_strings_cut_the_text_and_end_at_the_token_that_completes_them(place):
    case, engine = trajectories()[place], golden_engine()
    greedy = case["greedy"][:TOKENS]
    text = decode(greedy)
    wholes = [[text[i : i + n]] for i, n in ((0, 1), (3, 2), (9, 5), (17, 3), (30, 4))]
    several = [text[20:24], text[12:15], "never in it"]
    stops = [stop for stop in [*wholes, several, ["never in it"]] if all(stop)]
    params = [budget(TOKENS, stop=stop) for stop in stops]
    ended = 0
    for stop, output in zip(stops, engine.generate([case["prompt"]] * len(stops), params)):
        tokens, before, which = cut_at_string(greedy, stop)
        assert list(output.token_ids) == tokens and output.text == before
        assert output.stop_reason == which
        assert output.finish_reason == ("length" if stop == ["never in it"] else "stop")
        ended += output.finish_reason == "stop"
    assert ended >= 3


def test_text_streams_as_the_whole_decodes():
    case, engine = trajectories()[3], golden_engine()
    events = list(engine.stream(case["prompt"], budget(TOKENS, stop=["\n\n\n\n"])))
    assert "".join(event.text for event in events) == events[-1].output.text
    assert [t for event in events for t in event.token_ids] == case["greedy"][:TOKENS]
    assert events[-1].output.text == decode(case["greedy"][:TOKENS])
    assert len(events) == 1 + events[-1].output.stats.num_spec_steps


def test_the_model_s_own_end_tokens_end_unless_ignored():
    """The golden never ends by itself: here its end token is one that it says."""
    case, engine = trajectories()[3], golden_engine()
    greedy = case["greedy"][:TOKENS]
    end = greedy[11]
    first = greedy.index(end)

    class EndsSooner:
        eos_token_ids, vocab_size = (end,), engine.models.target.vocab_size

    class Models:
        target = EndsSooner

    engine.models = Models
    asked = {"max_tokens": TOKENS, "stop_token_ids": [end]}
    params = [SamplingParams(max_tokens=TOKENS), budget(TOKENS), SamplingParams(**asked)]
    ended, ignored, both = engine.generate([case["prompt"]] * 3, params)
    assert list(ended.token_ids) == greedy[: first + 1] and ended.finish_reason == "stop"
    assert ended.text == decode(greedy[:first]) and ended.stop_reason is None
    assert both.token_ids == ended.token_ids and both.stop_reason is None
    [stopped] = engine.generate([case["prompt"]], SamplingParams(**asked, ignore_eos=True))
    assert stopped.token_ids == ended.token_ids and stopped.stop_reason == end
    assert list(ignored.token_ids) == greedy and ignored.finish_reason == "length"
    assert engine.loop.idle


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_small_budgets(max_tokens):
    cases = trajectories()[:5]
    outputs = golden_engine().generate([c["prompt"] for c in cases], budget(max_tokens))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:max_tokens]
        assert output.finish_reason == "length"
        assert output.stats.generation_tokens == max_tokens
        assert output.stats.num_spec_steps <= max_tokens - 1


def test_a_budget_that_fills_the_context():
    """The last block reaches beyond the context; nothing of it is kept."""
    case, engine = trajectories()[6], golden_engine()
    full = engine.max_model_len - len(case["prompt"])
    output = engine.generate(case["prompt"], budget(full))
    assert len(output.token_ids) == full and output.finish_reason == "length"
    assert list(output.token_ids[:96]) == case["greedy"]
    more = engine.generate(case["prompt"], budget(full + 1), errors="return")
    assert more.finish_reason == "error" and "the context holds" in more.error
    assert more.error.endswith("or raise max_model_len")
    with pytest.raises(UsageError, match="the models were made for no more$"):
        golden_engine(max_model_len=10**6).generate(case["prompt"], budget(10**5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"stop": ("",)},
        {"logprobs": 21},
        {"seed": -1},
        {"max_tokens": 2.5},
        {"max_tokens": "5"},
        {"temperature": "hot"},
        {"top_p": None},
        {"top_k": 1.5},
        {"top_k": 2**40},
        {"seed": 1.5},
        {"stop": [3]},
        {"stop": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
    ],
)
def test_params_out_of_range_are_refused(wrong, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=rf"{name}.*; expected"):
        SamplingParams(**wrong)
