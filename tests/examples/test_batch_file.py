"""examples/batch_file.py: a file of prompts to a file of answers."""

import json
import pathlib

import pytest
from example_module import ROOT, example

from jaxspec import Engine, SamplingParams

batch_file = example("batch_file")

TARGET = ROOT / "tests" / "data" / "goldens" / "a" / "target"
FLAGS = ["--model", str(TARGET), "--at-once", "2", "--max-length", "96", "--dtype", "float32"]
ASKED = [
    {"id": number, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    for number, prompt in enumerate(["one", "two", "three", "four", "five"])
]


class Run:
    """Runs the program in a folder."""

    def __init__(self, folder: pathlib.Path):
        self.prompts, self.answers = folder / "prompts.jsonl", folder / "answers.jsonl"

    def __call__(self, lines: list[str] | None = None) -> int:
        self.prompts.write_text("\n".join(lines or map(json.dumps, ASKED)) + "\n")
        return batch_file.main([str(self.prompts), str(self.answers), *FLAGS])

    def written(self) -> dict[int | str, dict]:
        answers = [json.loads(line) for line in self.answers.read_text().splitlines()]
        assert len({answer["id"] for answer in answers}) == len(answers), "each once"
        return {answer["id"]: answer for answer in answers}


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int | str, dict]:
    """What an uninterrupted run writes."""
    run = Run(tmp_path_factory.mktemp("whole"))
    assert run() == 0
    return run.written()


def test_the_answers_are_the_engine_s(whole):
    engine = Engine.from_pretrained(TARGET, dtype="float32", max_batch=2, max_model_len=96)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = engine.generate([asked["prompt"] for asked in ASKED], params)
    assert {id: answer["text"] for id, answer in whole.items()} == {
        asked["id"]: output.text for asked, output in zip(ASKED, outputs)
    }
    assert all(answer["tokens"] == 8 for answer in whole.values())
    assert all(answer["finish_reason"] == "length" for answer in whole.values())


def test_it_goes_on_after_an_interrupt(run, whole, monkeypatch, capsys):
    step, submit, submitted = Engine.step, Engine.submit, []

    def stopped(engine, ids):
        events = step(engine, ids)
        if run.answers.read_text():
            raise KeyboardInterrupt
        return events

    def counted(engine, prompt, params):
        submitted.append(prompt)
        return submit(engine, prompt, params)

    monkeypatch.setattr(Engine, "step", stopped)
    assert run() == 130
    before = run.written()
    assert 0 < len(before) < len(ASKED)
    assert "run the same command to go on" in capsys.readouterr().err

    with run.answers.open("a") as file:
        file.write('{"id": 4, "te')  # what a killed program leaves
    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(Engine, "submit", counted)
    assert run() == 0
    assert run.written() == whole
    assert submitted == [asked["prompt"] for asked in ASKED if asked["id"] not in before]


def test_a_bad_line_is_one_line_and_the_others_go_on(run, whole, capsys):
    bad = [
        "nonsense",
        "[1]",
        '{"prompt": "no id"}',
        '{"id": true, "prompt": "no id"}',
        '{"id": "a"}',
        '{"id": "b", "prompt": "one", "max_token": 3}',
        '{"id": "c", "prompt": "one", "temperature": -1.0}',
        '{"id": "d", "prompt": "one", "max_tokens": 5000}',
        json.dumps(ASKED[0]),
    ]
    assert run([json.dumps(ASKED[0]), "", *bad, json.dumps(ASKED[1])]) == 1
    said = capsys.readouterr().err.replace("\r", "\n").splitlines()
    for number, words in enumerate(
        ["not JSON", "a list", "id is None", "id is True", "prompt is None", "'max_token'"]
        + ["temperature", "5000", "used before"],
        3,
    ):
        (line,) = [line for line in said if f"prompts.jsonl:{number}: " in line]
        assert words in line
    assert "9 lines failed" in said[-1]
    assert run.written() == {id: whole[id] for id in (0, 1)}


def test_lines_are_read_when_there_is_room():
    """The engine has never more than `at_once` requests, whatever the length of the file."""
    read, most = 0, 0

    def lines():
        nonlocal read
        for number in range(100):
            read += 1
            yield json.dumps({"id": number, "prompt": "one"}).encode()

    class Counting:
        """Ends one request in every step."""

        running: set[int] = set()

        def submit(self, prompt, params):
            self.running = self.running | {read}
            return read

        def step(self, ids):
            nonlocal most
            assert set(ids) == self.running
            most = max(most, len(self.running))
            assert read <= 100 and len(self.running) <= 4
            first = min(self.running)
            self.running = self.running - {first}
            return [type("Event", (), {"index": first, "output": "an output"})]

        def abort(self, ids):
            assert not set(ids)

    requests = batch_file.requests(lines(), set(), pytest.fail)
    answered = 0
    for _ in batch_file.answers(Counting(), requests, at_once=4):
        answered += 1
        assert read <= answered + 4
    assert (answered, most) == (100, 4)


def test_a_wrong_file_of_answers_is_left_alone(run, capsys):
    run.answers.write_text(json.dumps(ASKED[0]) + "\n")
    assert run() == 1
    assert "answers.jsonl:1 is not an answer of this program" in capsys.readouterr().err
    assert run.answers.read_text() == json.dumps(ASKED[0]) + "\n"
