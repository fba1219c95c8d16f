"""Time to the first token of a long prompt, and of its repeat, which is in the prefix cache.

    python scripts/bench_prefix.py --model qwen3-8b --prompt 8192 --json prefix.json
    python scripts/bench_prefix.py --model qwen3-0.6b --prompt 8192 --exact      equal bits, too

Every prompt is random and comes twice: the first time all of it is read, the second time all but
its last page is found in the prefix cache. Weights are random, because no time depends on them.
Programs are compiled beforehand. With `--exact` the tokens and the log probabilities of both times
must be equal. Without it only the times are compared, because the second reading has other shapes
and rounds differently. The last figures are the host's work for the book of pages, at
`--book-pages` pages.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from measuring import about, tell, write_json
from steady import random_prompts

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule import page_index, pages
from jaxspec.errors import LoadError
from jaxspec.measure.engines import random_pair
from jaxspec.models.shapes import NAMES


def main() -> None:
    options, begin = parse(), time.perf_counter()
    engine = build(options)
    tell("engine", begin)
    engine.warm_up(max_tokens=options.tokens, logprobs=1 if options.exact else None)
    tell("programs", begin)
    report = {
        **about(),
        "model": options.model,
        "prompt_tokens": options.prompt,
        "page_size": options.page_size,
        "exact": options.exact,
        **first_tokens(engine, options),
        "book": book_times(options.book_pages, options.page_size, options.prompt),
    }
    print(json.dumps(report, indent=1))
    write_json(options.json, report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=NAMES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of every output")
    parser.add_argument("--prompts", type=int, default=7, help="prompts, each read and repeated")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="also compare tokens and bits")
    parser.add_argument("--book-pages", type=int, default=10_000)
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Engine:
    """An engine with pages for two prompts: the running one, and the one before, which is kept."""
    pair = random_pair(options.model, options.block_size, jnp.dtype(options.dtype))
    longest = options.prompt + options.tokens
    each = -(-(longest + options.block_size) // options.page_size)
    return Engine.from_models(
        pair.models,
        pair.params,
        max_batch=options.max_batch,
        max_model_len=longest,
        page_size=options.page_size,
        num_pages=each * (options.max_batch + 1),
        driver="overlapped",
        exact=options.exact,
        prefix_caching=True,
        compile_ahead=False,
    )


def first_tokens(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token, for prompts that are read and for their repeats. The first
    prompt is not counted."""
    params = SamplingParams(
        max_tokens=options.tokens, ignore_eos=True, logprobs=1 if options.exact else None
    )
    missed, found = [], []
    for prompt in random_prompts(engine, options.prompts + 1, options.prompt):
        missed.append(engine.generate(prompt, params))
        found.append(engine.generate(prompt, params))
    cached = {output.stats.cached_tokens for output in found}
    expected = (options.prompt - 1) // options.page_size * options.page_size
    if cached != {expected} or any(output.stats.cached_tokens for output in missed):
        raise LoadError(
            f"repeats found {sorted(cached)} tokens; expected {expected} and none before"
        )
    if options.exact and not all(map(same_bits, missed, found)):
        raise LoadError("with exact, a repeat had other tokens or other log probabilities")
    return {
        "cached_tokens": expected,
        "read_ms": milliseconds(missed[1:]),
        "found_ms": milliseconds(found[1:]),
        "equal_tokens": sum(a.token_ids == b.token_ids for a, b in zip(missed, found)),
        "equal_bits": sum(map(same_bits, missed, found)) if options.exact else None,
        "prompts": options.prompts + 1,
    }


def same_bits(one: RequestOutput, other: RequestOutput) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def milliseconds(outputs: list[RequestOutput]) -> dict[str, float]:
    times = [1e3 * output.stats.ttft_s for output in outputs]
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def book_times(num_pages: int, page_size: int, prompt: int) -> dict[str, float]:
    """Microseconds of changes to the book of pages for one prompt, if every page has an entry."""
    book, count = pages.new_book(num_pages + 1, page_size), prompt // page_size
    for request in range(num_pages // count):
        text = tuple(range(request, request + count * page_size))
        book = pages.findable(pages.admit(book, request, len(text)), request, None)
        book = pages.fill(book, [(request, text)])
    for request in [*book.held]:
        book = pages.release(book, request)
    known, unknown = tuple(range(count * page_size)), tuple(range(-1, count * page_size - 1))
    look_up = lambda text: page_index.find(book.index, page_index.Chain(None), text)
    found = look_up(known)
    again = pages.findable(pages.admit(book, -1, len(known), found), -1, None, found)
    return {
        "pages": num_pages,
        "look_up_found_us": microseconds(lambda: look_up(known)),
        "look_up_missed_us": microseconds(lambda: look_up(unknown)),
        "admit_found_us": microseconds(lambda: pages.admit(book, -1, len(known), found)),
        "admit_missed_us": microseconds(lambda: pages.admit(book, -1, len(known))),
        "fill_us": microseconds(lambda: pages.fill(again, [(-1, known)])),
        "release_us": microseconds(lambda: pages.release(again, -1)),
    }


def microseconds(call: Callable[[], Any], calls: int = 20) -> float:
    """The median of several calls."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return round(statistics.median(times), 1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
