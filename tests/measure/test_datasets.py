"""Datasets in the usual layouts, and the errors of files that are in none."""

import json

import pytest

from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.datasets import BUILT_IN, Sample, built_in, random_ids, read_file


def file(tmp_path, *entries, array=False):
    path = tmp_path / "set.json"
    text = json.dumps(entries) if array else "\n".join(map(json.dumps, entries))
    path.write_text(text)
    return str(path)


def test_json_lines(tmp_path):
    path = file(tmp_path, {"prompt": "a", "category": "x"}, {"prompt": [3, 4], "output_tokens": 5})
    assert read_file(path) == [Sample("a", "x"), Sample((3, 4), "", 5)]


def test_spec_bench(tmp_path):
    path = file(tmp_path, {"question_id": 81, "category": "writing", "turns": ["one", "two"]})
    assert read_file(path) == read_file(path, "spec-bench") == [Sample("one", "writing")]


def test_sharegpt_keeps_conversations_that_a_human_begins(tmp_path):
    by_human = {"id": "1", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"}]}
    by_model = {"id": "2", "conversations": [{"from": "gpt", "value": "hello"}]}
    path = file(tmp_path, by_human, by_model, {"conversations": []}, array=True)
    assert read_file(path) == [Sample("hi", "sharegpt")]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    samples = built_in(name)
    assert len(samples) == 8 and len({s.category for s in samples}) == 8
    words = [s.prompt.split() for s in samples if isinstance(s.prompt, str)]
    assert len(words) == 8
    repeated = [one for one in words if len(set(one)) < 0.7 * len(one)]
    assert (len(repeated) >= 6) == (name == "repetitive")


def test_random_ids_are_seeded_and_within_the_vocabulary():
    samples = random_ids(3, 50, 17, seed=1)
    assert samples == random_ids(3, 50, 17, seed=1) != random_ids(3, 50, 17, seed=2)
    assert {len(s.prompt) for s in samples} == {50}
    assert all(isinstance(t, int) and 0 <= t < 17 for s in samples for t in s.prompt)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('{"prompt": "a"}\n{"question": "b"}', "line 2: expected \"prompt\".*found 'question'"),
        ('{"prompt": ["x"]}', 'line 1: "prompt" is neither'),
        ('{"prompt": ""}', 'line 1: "prompt" is neither'),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: .*positive"),
        ('{"turns": "a"}', 'line 1: "turns"'),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1: the first turn has no text"),
        ('[{"conversations": "x"}]', 'entry 1: "conversations"'),
        ("[1]", "entry 1: expected an object; found '1'"),
        ("[1", "is not JSON"),
        ("\n", "no prompt in it"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_file(str(path))


def test_no_file_and_no_layout(tmp_path):
    with pytest.raises(LoadError, match="cannot be read"):
        read_file(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="expected one of auto"):
        read_file(str(tmp_path), "csv")
