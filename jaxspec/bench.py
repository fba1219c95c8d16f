"""`python -m jaxspec.bench`: methods side by side, in one process, on the same requests."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxspec import cli

if TYPE_CHECKING:
    from jaxspec import Engine
    from jaxspec.acceptance.synthetic import Acceptance
    from jaxspec.engine.opening import Opened
    from jaxspec.measure.load import Work


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    arguments.given = given
    return cli.run(lambda: _bench(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxspec bench",
        description="Runs the same requests through every method, pass by pass in turn, and "
        "compares speed and acceptance. Tokens are counted, not re-tokenised.",
        allow_abbrev=False,
    )
    _add_models(parser.add_argument_group("models"))
    _add_requests(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))
    profiling = parser.add_argument_group("profiling")
    cli.add_profiling(profiling)
    profiling.add_argument(
        "--profile-concurrency", type=int, metavar="N", help="which of them (default: the largest)"
    )
    return parser


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="folder or hub id of the target (default: the demo pair)")
    group.add_argument("--draft-model", help="folder or hub id of the drafter")
    group.add_argument("--revision", help="branch, tag or commit of the target's hub id")
    group.add_argument(
        "--model-shape", help="instead of --model: qwen3-8b, qwen3-4b ... with random weights"
    )
    group.add_argument("--methods", default="none,dflash", help="default: none,dflash")
    group.add_argument("--block-size", type=int, help="tokens per block: 1 current + drafts")
    group.add_argument(
        "--dtype", help="bfloat16 or float32 (default: bfloat16; of the demo pair on a CPU float32)"
    )
    group.add_argument("--page-size", type=int, default=64)
    group.add_argument("--prefill-chunk", type=int, default=512)
    group.add_argument("--exact", action="store_true", help="bits independent of the method")
    group.add_argument("--adaptive", action="store_true", help="spans of the drafter adapt")
    group.add_argument("--num-drafts", type=int, default=7, help="of ngram, per step (default: 7)")
    group.add_argument("--driver", default="auto", help="auto, lockstep or overlapped")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        help="prose, python, repetitive, random, or a file (default: prose; python for the demo "
        "pair, random for a shape)",
    )
    group.add_argument(
        "--dataset-format", default="auto", help="auto, jsonl, spec-bench or sharegpt"
    )
    group.add_argument("--num-prompts", type=int, help="requests of a pass (default: all, or 8)")
    group.add_argument("--input-len", type=int, help="prompts are cut to so many tokens")
    group.add_argument("--output-len", type=int, default=64, help="tokens to generate at most")
    group.add_argument("--no-chat-template", action="store_true", help="take prompts as they are")
    group.add_argument("--ignore-eos", action="store_true", help="replies of exactly --output-len")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--synthetic-acceptance-length",
        metavar="TOKENS",
        help="draw acceptance with this mean length, bonus counted, instead of comparing drafts; "
        "or several to compare, with names: GSM8K=6.54,MATH-500=7.87",
    )
    group.add_argument(
        "--synthetic-acceptance-rates", metavar="R1,R2,...", help="the same, per place of the block"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--concurrency", default="1,4", help="list: 1,4,16 (default: 1,4)")
    group.add_argument(
        "--request-rate", type=float, help="arrivals per second (default: one ends, one starts)"
    )
    group.add_argument(
        "--requests-per-slot", type=int, metavar="N", help="N requests per concurrent one in a pass"
    )
    group.add_argument("--passes", type=int, default=3, help="over all requests, per method")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help="all figures and where they were measured")
    group.add_argument("--plot", metavar="PNG", help="needs the extra `plot`")
    group.add_argument("--breakdown", action="store_true", help="time draft, verify, accept apart")
    group.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of the floor (default: a copy, measured)"
    )
    group.add_argument(
        "--anchors", metavar="FILE", help="other systems' step times, to print beside ours"
    )
    group.add_argument("--debug", action="store_true", help="show where an error came from")


def _bench(arguments: argparse.Namespace) -> None:
    concurrencies = _integers("--concurrency", arguments.concurrency)
    methods = [name for name in arguments.methods.split(",") if name]
    _check(arguments, methods, concurrencies)

    from jaxspec.measure.peers import steady_decode

    arguments.dataset = arguments.dataset or _default_dataset(arguments)
    samples = _read_samples(arguments)
    _name_models(arguments)
    peers = _peers(arguments)
    opened = _open(arguments)
    work = _work(arguments, opened, samples)
    engines = _engines(arguments, opened, methods, concurrencies, work)
    result = _measure(arguments, engines, concurrencies, work)
    if peers:
        result["steady_decode"] = steady_decode(result["rows"], peers)
    _say(*_report(result))
    _write(arguments, result)
    if arguments.profile_dir or arguments.dump_programs:
        at = arguments.profile_concurrency or max(concurrencies)
        _profile(arguments, engines[methods[-1]], at, work)


def _check(arguments: argparse.Namespace, methods: list[str], concurrencies: list[int]) -> None:
    """What can be found before anything heavy is imported or loaded."""
    from jaxspec.console.files import check_writable
    from jaxspec.errors import UsageError

    positive = ("passes", "requests_per_slot", "output_len")
    for name in (*positive, "num_prompts", "input_len", "request_rate", "bandwidth"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; expected more than 0")
    if arguments.model and arguments.model_shape:
        raise UsageError("expected either --model or --model-shape")
    if not methods or len(set(methods)) < len(methods):
        raise UsageError(f"--methods {arguments.methods!r}; expected different names: none,dflash")
    if arguments.model_shape and arguments.draft_model:
        raise UsageError("--model-shape comes with a drafter of its own; leave out --draft-model")
    if arguments.synthetic_acceptance_length and arguments.synthetic_acceptance_rates:
        raise UsageError("expected one form of synthetic acceptance: a length, or rates")
    _synthetic(arguments)
    if arguments.profile_concurrency not in (None, *concurrencies):
        found = arguments.profile_concurrency
        raise UsageError(f"--profile-concurrency {found}; expected one of {concurrencies}")
    check_writable(arguments.json)
    cli.prepare_profiling(arguments)  # of a process that has not started jax

    from jaxspec.measure.plots import check_plot

    check_plot(arguments.plot)


def _integers(flag: str, text: str) -> list[int]:
    from jaxspec.errors import UsageError

    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}; expected integers, commas between") from error
    if numbers[0] < 1:
        raise UsageError(f"{flag} {text!r}; expected at least 1")
    return numbers


def _synthetic(arguments: argparse.Namespace) -> "dict[str, Acceptance]":
    """What acceptance is drawn like, by name; empty where drafts are compared."""
    rates, lengths = arguments.synthetic_acceptance_rates, arguments.synthetic_acceptance_length
    if rates is not None:
        flag = "--synthetic-acceptance-rates"
        return {"": tuple(_number(flag, rates, rate) for rate in rates.split(","))}
    if lengths is None:
        return {}
    flag, parts = "--synthetic-acceptance-length", lengths.split(",")
    named = [part.rpartition("=")[::2] for part in parts]
    if len(named) > 1:
        named = [(name or length, length) for name, length in named]
    return {name: _number(flag, lengths, length) for name, length in named}


def _number(flag: str, text: str, part: str) -> float:
    from jaxspec.errors import UsageError

    try:
        return float(part)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}; expected numbers, commas between") from error


def _default_dataset(arguments: argparse.Namespace) -> str:
    if arguments.model_shape:
        return "random"
    return "prose" if arguments.model else "python"


def _read_samples(arguments: argparse.Namespace) -> list[Any] | None:
    """None for random ids, which need the size of the vocabulary."""
    from jaxspec.measure.datasets import OWN, own_set, read_file

    if arguments.dataset == "random":
        return None
    if arguments.dataset in OWN:
        return own_set(arguments.dataset)
    return read_file(arguments.dataset, arguments.dataset_format)


def _name_models(arguments: argparse.Namespace) -> None:
    if arguments.model_shape:
        arguments.dtype = arguments.dtype or "bfloat16"
        return
    from jaxspec.console.models import chosen_models

    arguments.model, arguments.draft_model, arguments.dtype = chosen_models(
        arguments.model, arguments.draft_model, arguments.dtype, _say
    )


def _peers(arguments: argparse.Namespace) -> list[Any]:
    from jaxspec.measure.peers import read_peers

    if arguments.anchors is None:
        return []
    return read_peers(arguments.anchors, arguments.model_shape or os.path.basename(arguments.model))


def _open(arguments: argparse.Namespace) -> "Opened":
    from jaxspec.engine.opening import choose_dtype, open_models
    from jaxspec.measure.contenders import random_pair

    dtype = choose_dtype(arguments.dtype)
    if arguments.model_shape:
        return random_pair(arguments.model_shape, arguments.block_size or 16, dtype, arguments.seed)
    return open_models(
        arguments.model,
        arguments.draft_model,
        "auto",
        dtype,
        arguments.block_size,
        arguments.revision,
    )


def _work(
    arguments: argparse.Namespace, opened: "Opened", samples: list[Any] | None
) -> "list[Work]":
    from jaxspec.console.prompts import encoded
    from jaxspec.engine.params import SamplingParams
    from jaxspec.errors import UsageError
    from jaxspec.measure.datasets import random_ids
    from jaxspec.measure.load import Work

    if samples is None:
        vocabulary = opened.models.target.config.vocab_size
        count, length = arguments.num_prompts or 8, arguments.input_len or 128
        samples = random_ids(count, length, vocabulary, arguments.seed)
    samples = samples[: arguments.num_prompts]
    texts = [sample.prompt for sample in samples if isinstance(sample.prompt, str)]
    if texts and opened.tokenizer is None:
        raise UsageError(
            f"--dataset {arguments.dataset} holds text and --model-shape has no tokenizer; "
            "expected --dataset random or a file with token ids"
        )
    prompts = [s.prompt if isinstance(s.prompt, str) else list(s.prompt) for s in samples]
    encode = opened.tokenizer.encode if opened.tokenizer else None
    ids = encoded(prompts, _render(arguments, opened), encode)

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=samples[index].output_tokens or arguments.output_len,
            temperature=arguments.temperature,
            seed=(arguments.seed + index) % 2**32,
            ignore_eos=arguments.ignore_eos,
        )

    return [Work(tuple(one[: arguments.input_len]), params(i)) for i, one in enumerate(ids)]


def _render(arguments: argparse.Namespace, opened: "Opened") -> Any:
    if arguments.no_chat_template or opened.chat_template is None:
        return None
    from jaxspec.text.chat import render_chat

    return lambda prompt: render_chat(
        opened.chat_template, [{"role": "user", "content": prompt}], enable_thinking=False
    )


def _engines(
    arguments: argparse.Namespace,
    opened: "Opened",
    methods: list[str],
    concurrencies: list[int],
    work: "list[Work]",
) -> "dict[str, Engine]":
    from jaxspec.engine.plan import WIDTH_WITHOUT_DRAFTER
    from jaxspec.measure.contenders import engine_for

    longest = max(len(one.prompt) + one.params.max_tokens for one in work)
    drafter = opened.models.drafter
    block = drafter.config.block_size if drafter else WIDTH_WITHOUT_DRAFTER
    pages_each = -(-(longest + max(block, WIDTH_WITHOUT_DRAFTER)) // arguments.page_size)
    return {
        method: engine_for(
            opened,
            method,
            concurrencies,
            [len(one.prompt) for one in work],
            max_batch=max(concurrencies),
            max_model_len=longest,
            page_size=arguments.page_size,
            num_pages=pages_each * max(concurrencies),
            prefill_chunk=arguments.prefill_chunk,
            exact=arguments.exact,
            adaptive=arguments.adaptive,
            num_drafts=arguments.num_drafts,
            driver=arguments.driver,
            synthetic_acceptance=next(iter(_synthetic(arguments).values()), None),
        )
        for method in methods
    }


def _measure(
    arguments: argparse.Namespace,
    engines: "dict[str, Engine]",
    concurrencies: list[int],
    work: "list[Work]",
) -> dict[str, Any]:
    import jax

    from jaxspec.console.compile_clock import CompileClock
    from jaxspec.measure.breakdown import part_ms
    from jaxspec.measure.comparison import Schedule, compare, contenders_of, warm_up
    from jaxspec.measure.environment import command_line, environment
    from jaxspec.measure.floor import copy_bytes_per_second

    clock, acceptances = CompileClock(), _synthetic(arguments)
    bandwidth = (arguments.bandwidth or 0) * 1e9 or copy_bytes_per_second()
    contenders = contenders_of(engines, acceptances)
    schedule = Schedule(
        work=work,
        concurrencies=concurrencies,
        passes=arguments.passes,
        requests_per_slot=arguments.requests_per_slot,
        request_rate=arguments.request_rate,
        seed=arguments.seed,
    )
    with _bar(len(engines) * len(concurrencies), "warm-up", "") as bar:
        warm_up(contenders, schedule, arguments.temperature > 0, bar.update)
    warm_s = clock.seconds
    each = schedule.tokens_of_a_pass() * arguments.passes
    with _bar(each * len(contenders), "measuring", "tok") as bar:
        rows = compare(contenders, schedule, bandwidth, bar.update)
    context = sum(len(one.prompt) for one in work) // len(work)
    for row in rows:
        if arguments.breakdown and row["method"] != "none":
            row["part_ms"] = part_ms(engines[row["method"]], row["concurrency"], context)
    peak = next(iter(engines.values())).stats().peak_memory_bytes
    return {
        "command": command_line("bench", arguments.given),
        "environment": environment(),
        "title": _title(arguments, work, jax.devices()[0].device_kind),
        "synthetic": bool(acceptances),
        "arguments": {k: v for k, v in vars(arguments).items() if k != "given"},
        "prompts": len(work),
        "prompt_tokens": [len(one.prompt) for one in work],
        "copy_bytes_per_second": bandwidth,
        "compile_s": warm_s,
        "peak_memory_bytes": peak,
        "rows": rows,
    }


def _title(arguments: argparse.Namespace, work: "list[Work]", device: str) -> str:
    lengths = [len(one.prompt) for one in work]
    span = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)}-{max(lengths)}"
    model = arguments.model_shape or "/".join(os.path.normpath(arguments.model).split(os.sep)[-2:])
    weights = "random weights" if arguments.model_shape else arguments.dtype
    heat = f"temperature {arguments.temperature:g}" if arguments.temperature else "greedy"
    rate = f", {arguments.request_rate:g} requests/s" if arguments.request_rate else ""
    spans = ", adaptive spans" if arguments.adaptive else ""
    return (
        f"{model} ({weights}) on {device}: {len(work)} {os.path.basename(arguments.dataset)} "
        f"prompts of {span} tokens, up to {max(one.params.max_tokens for one in work)} out, "
        f"{heat}{rate}{spans}, passes: {arguments.passes}"
    )


def _bar(total: int, name: str, unit: str) -> Any:
    """A progress bar where somebody watches."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, disable=None, leave=False, file=sys.stderr)


def _report(result: dict[str, Any]) -> list[str]:
    from jaxspec.measure.peers import peer_table
    from jaxspec.measure.results import name_of, table

    lines = [result["title"], table(result["rows"])]
    lines += peer_table(result["steady_decode"]) if "steady_decode" in result else []
    if result["synthetic"]:
        lines.append("* SYNTHETIC acceptance: drawn, not found; it says nothing of the drafter")
    slower = [row for row in result["rows"] if row.get("speedup", {}).get("median", 1) < 1]
    lines += [
        f"{name_of(row)} is slower than plain decoding at concurrency {row['concurrency']}"
        for row in slower
    ]
    late = sum(row["compile_s_while_measured"] for row in result["rows"])
    if late > 0.1:
        lines.append(f"warning: {late:.1f} s of compiling fell into the measured passes")
    return lines


def _write(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    from jaxspec.console.files import write_json
    from jaxspec.measure.plots import draw_bench

    if arguments.json:
        write_json(arguments.json, result)
    if arguments.plot:
        draw_bench(result, arguments.plot)
        _say(f"plot: {arguments.plot}")


def _profile(
    arguments: argparse.Namespace, engine: "Engine", concurrency: int, work: "list[Work]"
) -> None:
    """One more pass of the last method; its times count nowhere."""
    from jaxspec.measure.environment import command_line
    from jaxspec.measure.load import Load, run_load
    from jaxspec.measure.recording import dump_programs, recording

    if arguments.dump_programs:
        programs = dump_programs(engine, arguments.dump_programs, arguments.temperature > 0)
        _say(f"programs: {len(programs)} in {arguments.dump_programs}, sizes in memory.json")
    if arguments.profile_dir:
        about = {"command": command_line("bench", arguments.given), "concurrency": concurrency}
        about["prompt_tokens"] = [len(one.prompt) for one in work]
        skip, steps = arguments.profile_skip, arguments.profile_steps
        with recording(engine, arguments.profile_dir, skip, steps, about):
            run_load(engine, work[: max(2 * concurrency, 4)], Load(concurrency))
        _say(f"profile: python -m jaxspec.profile {arguments.profile_dir}")


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
