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
    from jaxspec.engine.setup.load_models import Opened
    from jaxspec.measure.load import Schedule, Work


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    arguments.given = given
    return cli.run(lambda: _bench(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxspec bench",
        usage="%(prog)s [--model MODEL | --model-shape NAME] [--methods ONE,TWO] [options]",
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
    from jaxspec.console.numbers import integers

    concurrencies = integers("--concurrency", arguments.concurrency)
    methods = [name for name in arguments.methods.split(",") if name]
    _check(arguments, methods, concurrencies)
    acceptances = _acceptances(arguments)
    _prepare_outputs(arguments)

    from jaxspec.measure.bench import benchmark, contenders_of
    from jaxspec.measure.peers import steady_decode
    from jaxspec.measure.results import report
    from jaxspec.measure.workload import Requests, read_samples, work_of

    arguments.dataset = arguments.dataset or _default_dataset(arguments)
    asked = cli.filled(Requests, vars(arguments))
    samples = read_samples(asked)
    _name_models(arguments)
    peers = _peers(arguments)
    opened = _open(arguments)
    schedule = _schedule(arguments, concurrencies, work_of(asked, samples, opened))
    engines = _engines(arguments, opened, methods, schedule, acceptances)
    contenders = contenders_of(engines, acceptances)
    bandwidth = arguments.bandwidth and arguments.bandwidth * 1e9
    figures = benchmark(contenders, schedule, bandwidth, arguments.breakdown, _bar)
    result = _about(arguments, schedule, bool(acceptances)) | figures
    if peers:
        result["steady_decode"] = steady_decode(result["rows"], peers)
    cli.say(*report(result))
    _write(arguments, result)
    _profile(arguments, engines[methods[-1]], schedule)


def _check(arguments: argparse.Namespace, methods: list[str], concurrencies: list[int]) -> None:
    """What can be found before anything heavy is imported or loaded."""
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
    if arguments.profile_concurrency not in (None, *concurrencies):
        found = arguments.profile_concurrency
        raise UsageError(f"--profile-concurrency {found}; expected one of {concurrencies}")


def _acceptances(arguments: argparse.Namespace) -> "dict[str, Acceptance]":
    """What acceptance is drawn like, by name; empty where drafts are compared."""
    from jaxspec.console.numbers import named_numbers, numbers

    rates, lengths = arguments.synthetic_acceptance_rates, arguments.synthetic_acceptance_length
    if rates is not None:
        return {"": numbers("--synthetic-acceptance-rates", rates)}
    if lengths is not None:
        return named_numbers("--synthetic-acceptance-length", lengths)
    return {}


def _prepare_outputs(arguments: argparse.Namespace) -> None:
    from jaxspec.console.files import check_writable
    from jaxspec.measure.drawing import check_plot

    check_writable(arguments.json)
    check_plot(arguments.plot)
    cli.prepare_profiling(arguments)


def _default_dataset(arguments: argparse.Namespace) -> str:
    if arguments.model_shape:
        return "random"
    return "prose" if arguments.model else "python"


def _name_models(arguments: argparse.Namespace) -> None:
    if arguments.model_shape:
        arguments.dtype = arguments.dtype or "bfloat16"
        return
    from jaxspec.console.models import chosen_models

    arguments.model, arguments.draft_model, arguments.dtype = chosen_models(
        arguments.model, arguments.draft_model, arguments.dtype, cli.say
    )


def _peers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from jaxspec.measure.peers import read_peers

    if arguments.anchors is None:
        return []
    return read_peers(arguments.anchors, arguments.model_shape or os.path.basename(arguments.model))


def _open(arguments: argparse.Namespace) -> "Opened":
    from jaxspec.engine.setup.load_models import choose_dtype, open_models
    from jaxspec.measure.engines import random_pair

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


def _schedule(
    arguments: argparse.Namespace, concurrencies: list[int], work: "list[Work]"
) -> "Schedule":
    from jaxspec.measure.load import Schedule

    return cli.filled(Schedule, vars(arguments) | {"work": work, "concurrencies": concurrencies})


def _engines(
    arguments: argparse.Namespace,
    opened: "Opened",
    methods: list[str],
    schedule: "Schedule",
    acceptances: "dict[str, Acceptance]",
) -> "dict[str, Engine]":
    from jaxspec.measure.engines import engines_for

    return engines_for(
        opened,
        methods,
        schedule.concurrencies,
        schedule.work,
        page_size=arguments.page_size,
        prefill_chunk=arguments.prefill_chunk,
        exact=arguments.exact,
        adaptive=arguments.adaptive,
        num_drafts=arguments.num_drafts,
        driver=arguments.driver,
        synthetic_acceptance=next(iter(acceptances.values()), None),
    )


def _bar(total: int, name: str, unit: str) -> Any:
    """A progress bar where somebody watches."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, disable=None, leave=False, file=sys.stderr)


def _about(arguments: argparse.Namespace, schedule: "Schedule", synthetic: bool) -> dict[str, Any]:
    """What ran, and where."""
    from jaxspec.measure.environment import command_line, environment
    from jaxspec.measure.results import title

    model = _model_in_words(arguments)
    return {
        "command": command_line("bench", arguments.given),
        "environment": environment(),
        "title": title(model, arguments.dataset, arguments.adaptive, schedule),
        "synthetic": synthetic,
        "arguments": {k: v for k, v in vars(arguments).items() if k != "given"},
    }


def _model_in_words(arguments: argparse.Namespace) -> str:
    if arguments.model_shape:
        return f"{arguments.model_shape} (random weights)"
    name = "/".join(os.path.normpath(arguments.model).split(os.sep)[-2:])
    return f"{name} ({arguments.dtype})"


def _write(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    from jaxspec.console.files import write_json
    from jaxspec.measure.plots import draw_bench

    if arguments.json:
        write_json(arguments.json, result)
    if arguments.plot:
        draw_bench(result, arguments.plot)
        cli.say(f"plot: {arguments.plot}")


def _profile(arguments: argparse.Namespace, engine: "Engine", schedule: "Schedule") -> None:
    """One more pass of the last method; its times count nowhere."""
    from jaxspec.measure.environment import command_line
    from jaxspec.measure.load import Load, run_load
    from jaxspec.trace.profiling import Profiling, profiled

    asked = cli.filled(Profiling, vars(arguments))
    concurrency = arguments.profile_concurrency or max(schedule.concurrencies)
    about = {
        "command": command_line("bench", arguments.given),
        "concurrency": concurrency,
        "prompt_tokens": [len(one.prompt) for one in schedule.work],
    }
    with profiled(engine, asked, about, schedule.draws, cli.say):
        if asked.profile_dir:
            run_load(engine, schedule.work[: max(2 * concurrency, 4)], Load(concurrency))


if __name__ == "__main__":
    sys.exit(main())
