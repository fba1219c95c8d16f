"""Prompts to measure with: files in the usual layouts, three small built-in sets, random ids."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import LoadError, UsageError
from jaxspec.files import lines_of, text_of
from jaxspec.measure.options import Requests

BUILT_IN = ("prose", "python", "repetitive")
RANDOM = "random"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt of a dataset."""

    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    category: str = ""
    """Category of the prompt in the dataset."""
    output_tokens: int | None = None
    """Most tokens of the reply; None takes the benchmark's default."""


def read_samples(requests: Requests) -> list[Sample] | None:
    """The prompts of the dataset; None for random ids, which need the size of the vocabulary."""
    if requests.dataset == RANDOM:
        return None
    if requests.dataset in BUILT_IN:
        return built_in(requests.dataset)
    return read_file(requests.dataset, requests.dataset_format)


def built_in(name: str) -> list[Sample]:
    """A built-in set of prompts. prose: paragraphs with hardly any repetition. python: beginnings
    of modules, like those that the demo pair was trained on. repetitive: tables, lists and code
    with much repetition."""
    text = resources.files("jaxspec.measure").joinpath(f"data/{name}.jsonl").read_text("utf-8")
    return _parsed(name, text, "jsonl")


def read_file(path: str, layout: str = "auto") -> list[Sample]:
    """The prompts of a file. A conversation counts with its first turn only."""
    layouts = ("auto", *LAYOUTS)
    if layout not in layouts:
        raise UsageError(f"dataset format {layout!r}; expected one of {', '.join(layouts)}")
    try:
        text = text_of(Path(path).read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"dataset {path} cannot be read: {error}") from error
    return _parsed(path, text, layout)


def random_ids(count: int, length: int, vocab_size: int, seed: int) -> list[Sample]:
    """Uniformly random token ids, which no drafter can have learned."""
    random = np.random.default_rng(seed)
    prompts = random.integers(0, vocab_size, (count, length)).tolist()
    return [Sample(tuple(prompt), "random") for prompt in prompts]


def _parsed(source: str, text: str, layout: str) -> list[Sample]:
    samples = []
    for where, entry in _entries(source, text):
        if not isinstance(entry, dict):
            raise UsageError(f"{where}: expected an object; found {str(entry)[:60]!r}")
        sample = LAYOUTS[layout if layout != "auto" else _layout(where, entry)](where, entry)
        samples += [] if sample is None else [sample]
    if not samples:
        raise UsageError(f"dataset {source} has no prompt in it")
    return samples


def _entries(source: str, text: str) -> Iterator[tuple[str, Any]]:
    """The entries of a JSON array or of JSON lines, each with its place for error messages."""
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source} is not JSON: {error}") from error
        yield from ((f"{source}, entry {i}", entry) for i, entry in enumerate(entries, 1))
        return
    for number, line in enumerate(lines_of(text), 1):
        if not line.strip():
            continue
        try:
            yield f"{source}, line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{source}, line {number}: not JSON ({error}); found {line[:60]!r}"
            ) from error


def _layout(where: str, entry: dict[str, Any]) -> str:
    layouts = {"prompt": "jsonl", "turns": "spec-bench", "conversations": "sharegpt"}
    for key, layout in layouts.items():
        if key in entry:
            return layout
    raise UsageError(
        f'{where}: expected "prompt", "turns" (Spec-Bench) or "conversations" (ShareGPT); '
        f"found {', '.join(map(repr, entry)) or 'nothing'}"
    )


def _jsonl(where: str, entry: dict[str, Any]) -> Sample:
    """{"prompt": text or ids, "category": ..., "output_tokens": ...}"""
    tokens = entry.get("output_tokens")
    prompt = _text_or_ids(where, entry.get("prompt"))
    if tokens is not None and not (type(tokens) is int and tokens > 0):
        raise UsageError(f'{where}: "output_tokens" is {tokens!r}; expected a positive integer')
    return Sample(prompt, str(entry.get("category", "")), tokens)


def _text_or_ids(where: str, prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise UsageError(f'{where}: "prompt" is neither text nor a list of token ids')


def _spec_bench(where: str, entry: dict[str, Any]) -> Sample:
    """{"question_id": ..., "category": ..., "turns": [text, ...]}"""
    turns = entry.get("turns")
    if not (isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]):
        raise UsageError(f'{where}: "turns" is not a list that begins with text')
    return Sample(turns[0], str(entry.get("category", "")))


def _sharegpt(where: str, entry: dict[str, Any]) -> Sample | None:
    """{"conversations": [{"from": "human", "value": text}, ...]}; None if the first turn is not a
    human's."""
    turns = entry.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UsageError(f'{where}: "conversations" is not a list of objects')
    if not turns or turns[0].get("from") not in ("human", "user"):
        return None
    text = turns[0].get("value")
    if not isinstance(text, str):
        raise UsageError(f'{where}: the first turn has no text in "value"')
    return Sample(text, "sharegpt") if text else None


LAYOUTS: dict[str, Callable[[str, dict[str, Any]], Sample | None]] = {
    "jsonl": _jsonl,
    "spec-bench": _spec_bench,
    "sharegpt": _sharegpt,
}
