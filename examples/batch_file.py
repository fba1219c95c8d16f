"""Continues every prompt of a file, without a server: JSON lines in, JSON lines out.

    python examples/batch_file.py prompts.jsonl answers.jsonl
    python examples/batch_file.py prompts.jsonl answers.jsonl --model Qwen/Qwen3-8B \
        --draft-model z-lab/Qwen3-8B-DFlash-b16 --at-once 32

This shows `Engine.submit` and `Engine.step`: requests join and leave a running batch. A line of the
first file is {"id": 1, "prompt": "import os"}; it may also have fields of `SamplingParams`, such as
"max_tokens". A line of the second file is {"id": 1, "text": ..., "finish_reason": ..., "tokens":
...}, in the order in which requests end.

- You can stop the program at any time. The same command then continues: it skips the ids that are
  in the second file already.
- Memory is bounded: a line is read when there is room for its request. Only ids are remembered.
- A line that cannot be used is reported in one line on stderr, and the other lines are continued.
  The exit code is then 1.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from tqdm import tqdm

import jaxspec
from jaxspec import Engine, JaxspecError, RequestOutput, SamplingParams, UsageError

FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
Id = str | int


@dataclasses.dataclass(frozen=True)
class Asked:
    """One line of the file with prompts."""

    line: int
    """Number of the line, counted from 1."""
    id: Id
    prompt: str
    params: SamplingParams


Complain = Callable[[int, object], None]
"""A function that reports what is wrong with a line, given its number."""


def requests(lines: Iterable[bytes], done: Set[Id], complain: Complain) -> Iterator[Asked]:
    """The requests of these lines, without those whose ids are in `done`. A line is read only when
    its request is needed."""
    seen: set[Id] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            asked = parsed(number, line)
            if asked.id in seen:
                raise UsageError(f"the id {asked.id!r} was used before; give every line its own")
        except UsageError as error:
            complain(number, error)
            continue
        seen.add(asked.id)
        if asked.id not in done:
            yield asked


def parsed(number: int, line: bytes) -> Asked:
    """The request of one line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # also if it is not UTF-8, or nested too deep
        raise UsageError(f'not JSON ({error}); expected {{"id": 1, "prompt": "text"}}') from error
    if not isinstance(fields, dict):
        raise UsageError(f"a {type(fields).__name__}; expected an object with id and prompt")
    id, prompt = fields.pop("id", None), fields.pop("prompt", None)
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UsageError(f"the id is {id!r}; expected a string or an integer")
    if not isinstance(prompt, str):
        raise UsageError(f"the prompt is {prompt!r}; expected a string")
    if unknown := sorted(set(fields) - FIELDS):
        raise UsageError(f"unknown field {unknown[0]!r}; expected some of {sorted(FIELDS)}")
    return Asked(number, id, prompt, SamplingParams(**fields))


def answers(
    engine: Engine, waiting: Iterator[Asked], at_once: int
) -> Iterator[tuple[Asked, RequestOutput | UsageError]]:
    """Yields each request as it ends, with its output or with the error for which it cannot run. At
    most `at_once` requests are in the engine."""
    running: dict[int, Asked] = {}
    try:
        while True:
            while len(running) < at_once and (asked := next(waiting, None)) is not None:
                try:
                    running[engine.submit(asked.prompt, asked.params)] = asked
                except UsageError as error:
                    yield asked, error
            if not running:
                return
            for event in engine.step(running):
                if event.output is not None:
                    yield running.pop(event.index), event.output
    finally:  # also if the caller stops in the middle
        engine.abort(running)


def finished_ids(path: Path) -> set[Id]:
    """The ids in the file of answers. If the last line was left unfinished by a killed program, it
    is removed."""
    ids: set[Id] = set()
    if not path.exists():
        return ids
    with path.open("r+b") as file:
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(line)
            ids.add(id_of_answer(line, f"{path}:{number}"))
    return ids


def id_of_answer(line: bytes, where: str) -> Id:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        answer: dict[str, Any] = json.loads(line)
        if {"text", "finish_reason"} <= answer.keys():
            return answer["id"]
    raise UsageError(f"{where} is not an answer of this program; name another file for answers")


def run(engine: Engine, prompts: Path, out: Path, at_once: int) -> int:
    """Answers the prompts that are not answered yet; returns how many lines failed."""
    done, failed = finished_ids(out), 0
    with prompts.open("rb") as lines:
        total = sum(bool(line.strip()) for line in lines)
    # Line buffered, so that an answer is in the file as soon as it is known.
    with prompts.open("rb") as lines, out.open("a", buffering=1) as file:
        with tqdm(total=total, initial=len(done), unit=" prompts") as progress:

            def complain(line: int, error: object) -> None:
                nonlocal failed
                failed += 1
                progress.write(f"{prompts}:{line}: {error}", file=sys.stderr)

            for asked, output in answers(engine, requests(lines, done, complain), at_once):
                if isinstance(output, UsageError) or output.error is not None:
                    complain(asked.line, getattr(output, "error", None) or output)
                    continue
                file.write(json.dumps(answer_of(asked, output)) + "\n")
                progress.update()
    return failed


def answer_of(asked: Asked, output: RequestOutput) -> dict[str, object]:
    return {
        "id": asked.id,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "tokens": len(output.token_ids),
    }


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    pair = (options.model, options.draft_model) if options.model else jaxspec.demo_pair()
    try:
        finished_ids(options.answers)  # a wrong file is refused before the models are read
        with Engine.from_pretrained(
            *pair, dtype=options.dtype, max_batch=options.at_once, max_model_len=options.max_length
        ) as engine:
            failed = run(engine, options.prompts, options.answers, options.at_once)
    except KeyboardInterrupt:
        print(f"stopped; run the same command to go on with {options.answers}", file=sys.stderr)
        return 130
    except (JaxspecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if failed:
        print(f"{failed} lines failed; correct them and run the command again", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompts", type=Path, help="file of prompts, JSON lines")
    parser.add_argument("answers", type=Path, help="file to write, or to go on with")
    parser.add_argument("--model", help="folder or hub id (default: the demo pair)")
    parser.add_argument("--draft-model", help="folder or hub id of the drafter")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32 or auto")
    parser.add_argument("--at-once", type=int, default=8, help="requests that run at once")
    parser.add_argument("--max-length", type=int, default=1024, help="most tokens of a request")
    return parser


if __name__ == "__main__":
    sys.exit(main())
