"""The forms in which a prompt and its parameters may come, and those that are refused."""

from fractions import Fraction
from types import MappingProxyType

import jaxtyping
import numpy as np
import pytest

from jaxspec.console.prompts import PromptSources, read_prompts
from jaxspec.engine.requests.prompts import as_list, token_ids
from jaxspec.engine.requests.sampling_keywords import params_for_each
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.datasets import read_file

VOCABULARY = 50


class Tokenizer:
    def encode(self, text, add_special_tokens):
        return [len(text), int(add_special_tokens)]


@pytest.fixture(autouse=True)
def as_users_run(monkeypatch):
    """Users have no beartype, which would find wrong types before our own checks do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def type_and_text(value: object) -> str:
    """The name of a case, the same in every process: a generator's text holds its address."""
    return type(value).__name__ if " at 0x" in str(value) else str(value)


def ids_of(prompts):
    """Token ids of every prompt, and whether it is a single one, as the engine reads them."""
    listed, is_one = as_list(prompts)
    return [token_ids(prompt, Tokenizer(), VOCABULARY) for prompt in listed], is_one


def one_line(message: str) -> str:
    assert message and "\n" not in message and len(message) < 400, message
    return message


TAKEN = [
    ("abc", [(3, 1)], True),
    ([4, 5], [(4, 5)], True),
    ((4, 5), [(4, 5)], True),
    (range(3), [(0, 1, 2)], True),
    (np.array([4, 5]), [(4, 5)], True),
    ({"prompt": "abc"}, [(3, 1)], True),
    ({"prompt_token_ids": [4, 5]}, [(4, 5)], True),
    ({"prompt_token_ids": np.array([4, 5])}, [(4, 5)], True),
    (MappingProxyType({"prompt": "abc"}), [(3, 1)], True),
    (
        [{"prompt": "abc"}, {"prompt_token_ids": (4, 5)}, "a", [6]],
        [(3, 1), (4, 5), (1, 1), (6,)],
        0,
    ),
    (["abc"], [(3, 1)], False),
    ((text for text in ["a", "bc"]), [(1, 1), (2, 1)], False),
    (np.array([[4, 5], [6, 7]]), [(4, 5), (6, 7)], False),
    ([], [], False),
]


@pytest.mark.parametrize(("prompts", "ids", "is_one"), TAKEN, ids=type_and_text)
def test_a_prompt_is_text_or_ids_or_a_mapping_with_one_of_them(prompts, ids, is_one):
    assert ids_of(prompts) == (ids, bool(is_one))


REFUSED = [
    ({"a": 1}, "the key 'a'"),
    ({}, "neither of its keys"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "both 'prompt' and 'prompt_token_ids'"),
    ({"prompt": "a", "multi_modal_data": None}, "the key 'multi_modal_data'"),
    ({"prompt": [1, 2]}, "the prompt is of type list; expected text"),
    ({"prompt": None}, "the prompt is of type NoneType"),
    ({"prompt_token_ids": "ab"}, "the prompt_token_ids is of type str"),
    ({"prompt_token_ids": {"prompt": "a"}}, "the prompt_token_ids is of type dict"),
    ({"prompt_token_ids": {3, 1}}, "a prompt is of type set"),
    ({"prompt_token_ids": [True]}, "True among its token ids"),
    ({1: 2}, "the key '1'"),
    ([{"a": 1}], "the key 'a'"),
    ({3, 1}, "prompts are of type set"),
    (frozenset("ab"), "prompts are of type frozenset"),
    ([{3, 1}], "a prompt is of type set"),
    ([True, False], "True among its token ids"),
    ([1, True], "True among its token ids"),
    (np.array([True]), "True among its token ids"),
    (True, "prompts are of type bool"),
    (None, "prompts are of type NoneType"),
    (1.5, "prompts are of type float"),
    ([1, 2.0], "2.0 among its token ids"),
    (np.array([1.0]), "of type float"),
    (np.array(3), "prompts are of type int"),
    (b"ab", "of type bytes"),
    (bytearray(b"ab"), "of type bytearray"),
    (memoryview(b"ab"), "of type memoryview"),
    ([b"ab"], "of type bytes"),
    ([(token for token in [1, 2])], "of type generator"),
    ([None], "of type NoneType"),
    ([1, "a"], "'a' among its token ids"),
    (["a", 1], "of type int"),
    ([[]], "the prompt is empty"),
    ([-1], "the id -1, outside the vocabulary of 50"),
    ([50], "the id 50, outside"),
    ([10**400], "outside the vocabulary"),
    ([10**5000], "outside the vocabulary"),
]


@pytest.mark.parametrize(("prompts", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_any_other_prompt_is_refused_in_one_line(prompts, said):
    with pytest.raises(UsageError) as caught:
        ids_of(prompts)
    assert said in one_line(str(caught.value))


def test_an_array_that_cannot_be_read_is_refused():
    class Elsewhere:
        def __array__(self, *_, **__):
            raise TypeError("it is on\nanother device")

    with pytest.raises(UsageError, match="type Elsewhere cannot be read as an array"):
        ids_of(Elsewhere())


PARAMS = SamplingParams()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ((PARAMS for _ in range(2)), "of type generator"),
        ({"max_tokens": 3}, "of type dict"),
        ({PARAMS}, "of type set"),
        ("greedy", "of type str"),
        (3, "of type int"),
        ([PARAMS, {"max_tokens": 3}], "hold {'max_tokens': 3}"),
        ([PARAMS], "1 sampling params for 2 prompts"),
    ],
    ids=type_and_text,
)
def test_params_are_one_record_or_a_list_of_them(params, said):
    with pytest.raises(UsageError) as caught:
        params_for_each(2, params, None, {})
    assert said in one_line(str(caught.value))
    assert params_for_each(2, (PARAMS, PARAMS), None, {}) == [PARAMS, PARAMS]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": True},
        {"max_tokens": 10**400},
        {"max_tokens": -(10**5000)},
        {"temperature": False},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"top_p": True},
        {"top_p": float("nan")},
        {"top_k": True},
        {"min_p": False},
        {"min_p": float("nan")},
        {"seed": True},
        {"seed": 10**400},
        {"logprobs": True},
        {"ignore_eos": 1},
        {"speculate": None},
        {"stop": b"ab"},
        {"stop": {"a": 1}},
        {"stop": ["a" * 10**6, 3]},
        {"stop_token_ids": b"ab"},
        {"stop_token_ids": "12"},
        {"stop_token_ids": [True]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": {3: 1}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_params_of_another_type_or_size_are_refused(wrong):
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))} .*; expected") as caught:
        SamplingParams(**wrong)
    one_line(str(caught.value))


def test_numbers_of_numpy_and_fractions_are_numbers():
    params = SamplingParams(
        np.int64(3), np.float32(0.5), Fraction(1, 2), stop_token_ids=[np.int32(3)]
    )
    assert (params.max_tokens, params.temperature, params.stop_token_ids) == (3, 0.5, (3,))


NOT_NEWLINES = "a\fb\x0bc\x1cd\x85e\u2028f\u2029g\rh"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_prompt_file_is_split_at_newlines_only(tmp_path, newline, mark):
    file = tmp_path / "prompts.txt"
    text = f"{mark}{NOT_NEWLINES}{newline}{newline}last"
    file.write_bytes(text.encode())
    assert read_prompts(PromptSources(file=str(file)), None) == [NOT_NEWLINES, "last"]
    with file.open() as stdin:
        assert read_prompts(PromptSources(file="-"), stdin) == [NOT_NEWLINES, "last"]


def test_json_lines_may_hold_what_python_takes_for_a_newline(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85"}\n{"prompt": [3]}\n', encoding="utf-8")
    assert read_prompts(PromptSources(file=str(file)), None) == ["a\u2028b\x85", [3]]
    assert [sample.prompt for sample in read_file(str(file))] == ["a\u2028b\x85", (3,)]


@pytest.mark.parametrize(
    ("sources", "content", "kind", "said"),
    [
        (PromptSources(texts=("-",)), b"\xff", LoadError, "standard input cannot be read"),
        (PromptSources(file="-"), b"\xff", LoadError, "prompt file - cannot be read"),
        (PromptSources(file="-"), b"\n", UsageError, "prompt file - is empty"),
        (PromptSources(file="-"), b'{"prompt": ' + b"[" * 10**6, UsageError, "line 1"),
        (PromptSources(file="-"), b'{"prompt": [1' + b"0" * 10**4, UsageError, "line 1"),
        (PromptSources(file="-"), b'{"prompt": [true]}', UsageError, "neither text nor a list"),
        (PromptSources(texts=("-",)), None, LoadError, "standard input is closed"),
        (PromptSources(file="-"), None, LoadError, "standard input is closed"),
        (PromptSources(ids=("1" * 5000,)), None, UsageError, "expected integers"),
    ],
)
def test_input_that_holds_no_prompt(tmp_path, sources, content, kind, said):
    (tmp_path / "stdin").write_bytes(content or b"")
    with (tmp_path / "stdin").open(encoding="utf-8") as stdin, pytest.raises(kind) as caught:
        read_prompts(sources, None if content is None else stdin)
    assert said in one_line(str(caught.value))


def test_a_closed_stream_is_one_line_too(tmp_path):
    with (tmp_path / "stdin").open("w+") as stdin:
        pass
    with pytest.raises(LoadError, match="standard input cannot be read"):
        read_prompts(PromptSources(texts=("-",)), stdin)
