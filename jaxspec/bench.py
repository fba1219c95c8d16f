"""`python -m jaxspec.bench`: compares methods in one process, on the same requests."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxspec import cli
from jaxspec.console.files import check_writable, write_json
from jaxspec.console.flags import add_flags, filled, flag_of, integers, named_numbers, numbers
from jaxspec.console.models import NamedModels, check_models
from jaxspec.console.parser import Parser
from jaxspec.engine.plan.methods import choose_method
from jaxspec.engine.plan.options import Acceptance, EngineOptions
from jaxspec.errors import UsageError
from jaxspec.measure.options import Passes, Requests
from jaxspec.models.shapes import NAMES
from jaxspec.proposers.methods import DRAFTERS, METHODS
from jaxspec.trace.options import Profiling

if TYPE_CHECKING:
    from jaxspec import Engine
    from jaxspec.engine.setup.opened import Opened
    from jaxspec.measure.load import Schedule, Work


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(argv)
    arguments.argv = argv
    return cli.run(lambda: _bench(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec bench",
        usage="%(prog)s [--model MODEL | --model-shape NAME] [--methods ONE,TWO] [options]",
        description="Sends the same requests through every method, taking turns pass by pass, and "
        "compares speed and acceptance. Tokens are counted as the engine emits them.",
    )
    _add_models(parser.add_argument_group("models"))
    _add_methods(parser.add_argument_group("methods"))
    _add_requests(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))
    profiling = parser.add_argument_group("profiling")
    cli.add_profiling(profiling)
    profiling.add_argument(
        "--profile-concurrency",
        type=int,
        metavar="N",
        help="One of --concurrency to record (default: the largest)",
    )
    return parser


def _add_models(group: argparse._ArgumentGroup) -> None:
    cli.add_models(group)
    group.add_argument(
        "--model-shape",
        choices=NAMES,
        help="Instead of --model: a published shape with random weights (default: none)",
    )


def _add_methods(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--methods",
        default="none,dflash",
        metavar="ONE,TWO",
        help=f"Methods to compare, of {', '.join(METHODS)} (default: %(default)s)",
    )
    add_flags(group, EngineOptions, "adaptive", "confidence_threshold", "num_drafts")
    add_flags(group, EngineOptions, "exact", "driver", "kernels", "fp8_activations")
    add_flags(group, EngineOptions, "tensor_parallel_size", "exchange")
    add_flags(group, EngineOptions, "page_size", "prefill_chunk", "prefill_budget")
    add_flags(group, EngineOptions, "prefill_beside_decoding")
    add_flags(group, EngineOptions, "prefix_caching", default=False)
    room = "Positions of a request that there is room for (default: those of the longest request)"
    add_flags(group, EngineOptions, "max_model_len", default=None, help=room)
    cli.add_kept_programs(group)


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add_flags(group, Requests, "dataset", required=False)
    add_flags(group, Requests, "dataset_format", "num_prompts", "input_len", "output_len")
    add_flags(group, Requests, "no_chat_template", "ignore_eos", "temperature", "seed")
    group.add_argument(
        "--synthetic-acceptance-length",
        metavar="TOKENS",
        help="Draw how many drafts are accepted, with this mean acceptance length, instead of "
        "comparing drafts; or several lengths to compare, with names: GSM8K=6.54,MATH-500=7.87 "
        "(default: compare drafts)",
    )
    group.add_argument(
        "--synthetic-acceptance-rates",
        metavar="R1,R2,...",
        help="Give, instead of a length, the share of steps that accept each position of a block "
        "(default: compare drafts)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        default="1,4",
        metavar="N,N,...",
        help="Numbers of requests at once, each measured on its own (default: %(default)s)",
    )
    add_flags(group, Passes, "passes", "requests_per_slot", "request_rate")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json",
        metavar="FILE",
        help="Write all figures, with the machine and versions (default: none)",
    )
    group.add_argument(
        "--plot", metavar="PNG", help="Draw the figures; needs the extra `plot` (default: none)"
    )
    group.add_argument(
        "--breakdown", action="store_true", help="Also time drafting, verifying and accepting alone"
    )
    group.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="Memory bandwidth for the lower bound of a step's time (default: measured by a copy)",
    )
    group.add_argument(
        "--anchors",
        metavar="FILE",
        help="Step times of other systems, to compare with (default: none)",
    )
    cli.add_debug(group)


def _bench(arguments: argparse.Namespace) -> None:
    concurrencies = integers("--concurrency", arguments.concurrency)
    methods = [name for name in arguments.methods.split(",") if name]
    _check(arguments, methods, concurrencies)
    acceptances = _acceptances(arguments)
    profiling = _prepared_outputs(arguments)
    options = _engine_options(arguments)
    EngineOptions(**options)  # refuses wrong ones
    if not arguments.model_shape:
        check_models(filled(NamedModels, vars(arguments)), tuple(methods))

    from jaxspec.measure.datasets import read_samples

    arguments.dataset = arguments.dataset or _default_dataset(arguments)
    requests = filled(Requests, vars(arguments))
    samples = read_samples(requests)

    # Nothing above this imports jax, so that errors in the flags are reported at once.
    from jaxspec.measure.bench import benchmark, contenders_of
    from jaxspec.measure.environment import kernels
    from jaxspec.measure.peers import steady_decode
    from jaxspec.measure.results import report
    from jaxspec.measure.workload import work_of

    peers = _named_models_and_peers(arguments)
    opened = _open(arguments, methods)
    schedule = _schedule(arguments, concurrencies, work_of(requests, samples, opened))
    engines = _engines(arguments, opened, methods, schedule, acceptances, options)
    contenders = contenders_of(engines, acceptances)
    bandwidth = arguments.bandwidth and arguments.bandwidth * 1e9
    about = _about(arguments, schedule, bool(acceptances))
    about["kernels"] = {method: kernels(engine) for method, engine in engines.items()}
    result: dict[str, Any] = {}
    for figures in benchmark(contenders, schedule, bandwidth, arguments.breakdown, _bar):
        result = about | figures
        if peers:
            result["steady_decode"] = steady_decode(result["rows"], peers)
        _write(arguments, result)  # after every pass: what a time limit leaves is still written
    cli.say(*report(result), *_kernel_lines(engines))
    _draw(arguments, result)
    _profile(arguments, profiling, engines[methods[-1]], schedule)


def _kernel_lines(engines: "dict[str, Engine]") -> list[str]:
    """One line that names the kernels, or one line per method if the methods use different ones."""
    from jaxspec.models.kernels import kernels_line

    lines = {method: kernels_line(engine.kernels) for method, engine in engines.items()}
    if len(set(lines.values())) == 1:
        return [*set(lines.values())]
    return [f"{method}: {line}" for method, line in lines.items()]


def _check(arguments: argparse.Namespace, methods: list[str], concurrencies: list[int]) -> None:
    """Refuses wrong flags before slow imports and before loading a model."""
    positive = ("passes", "requests_per_slot", "output_len", "max_model_len")
    for name in (*positive, "num_prompts", "input_len", "request_rate", "bandwidth"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise UsageError(f"{flag_of(name)} is {value}; expected more than 0")
    if arguments.model and arguments.model_shape:
        raise UsageError("found both --model and --model-shape; expected one of them")
    for method in methods:
        choose_method(method, has_drafter=True)
    if not methods or len(set(methods)) < len(methods):
        raise UsageError(f"--methods {arguments.methods!r}; expected different names: none,dflash")
    if len(kinds := _kinds(methods)) > 1:
        raise UsageError(f"--methods needs drafters of kinds {', '.join(kinds)}; expected one kind")
    if arguments.model_shape and arguments.draft_model:
        raise UsageError("--model-shape has a drafter of its own; leave out --draft-model")
    if arguments.model_shape and arguments.quantization:
        raise UsageError(
            "--quantization is for weights that are read; leave it out, or name a --model-shape "
            "that ends with -fp8"
        )
    if arguments.synthetic_acceptance_length and arguments.synthetic_acceptance_rates:
        raise UsageError("expected one form of synthetic acceptance: a length, or rates")
    if arguments.profile_concurrency not in (None, *concurrencies):
        concurrency = arguments.profile_concurrency
        raise UsageError(f"--profile-concurrency {concurrency}; expected one of {concurrencies}")


def _acceptances(arguments: argparse.Namespace) -> dict[str, Acceptance]:
    """Synthetic acceptances by name; empty if the target decides which drafts are accepted."""
    rates, lengths = arguments.synthetic_acceptance_rates, arguments.synthetic_acceptance_length
    if rates is not None:
        return {"": numbers("--synthetic-acceptance-rates", rates)}
    if lengths is not None:
        return {**named_numbers("--synthetic-acceptance-length", lengths)}
    return {}


def _prepared_outputs(arguments: argparse.Namespace) -> Profiling:
    from jaxspec.measure.drawing import check_plot

    check_writable(arguments.json)
    check_plot(arguments.plot)
    return cli.prepared_profiling(vars(arguments))


def _default_dataset(arguments: argparse.Namespace) -> str:
    if arguments.model_shape:
        return "random"
    return "prose" if arguments.model else "python"


def _named_models_and_peers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Completes the names of the models, says what runs, and reads the figures to compare with."""
    from jaxspec.console.device import device_in_words
    from jaxspec.console.opening import say_what_runs
    from jaxspec.engine.setup.load_models import DEFAULT_DTYPE

    if arguments.model_shape:
        arguments.dtype = arguments.dtype or DEFAULT_DTYPE
        rounded = ", the drafter in FP8" if arguments.draft_quantization else ""
        what = f"{arguments.model_shape} with random weights, in {arguments.dtype}{rounded}"
        devices = device_in_words(arguments.tensor_parallel_size)
        cli.say(f"running on {devices}: {what}")
    else:
        named, devices = filled(NamedModels, vars(arguments)), arguments.tensor_parallel_size
        chosen = say_what_runs(named, cli.say, devices=devices)
        arguments.model, arguments.draft_model = chosen.model, chosen.draft_model
        arguments.dtype = chosen.dtype
    return _peers(arguments)


def _peers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from jaxspec.measure.peers import read_peers

    if arguments.anchors is None:
        return []
    return read_peers(arguments.anchors, arguments.model_shape or os.path.basename(arguments.model))


def _kinds(methods: Sequence[str]) -> list[str]:
    """The kinds of drafters that these methods need."""
    asked = dict.fromkeys(method.partition("+")[0] for method in methods)
    return [kind for kind in asked if kind in DRAFTERS]


def _open(arguments: argparse.Namespace, methods: list[str]) -> "Opened":
    from jaxspec.console.progress import bar
    from jaxspec.engine.setup.load_models import choose_dtype, open_models
    from jaxspec.measure.engines import random_pair

    dtype = choose_dtype(arguments.dtype)
    if arguments.model_shape:
        kind = next(iter(_kinds(methods)), DRAFTERS[0])
        return random_pair(
            arguments.model_shape,
            arguments.block_size,
            dtype,
            arguments.seed,
            kind,
            arguments.tensor_parallel_size,
            arguments.draft_quantization,
        )
    with bar("reading weights", "B") as report:
        return open_models(
            arguments.model,
            arguments.draft_model,
            dtype=dtype,
            quantization=arguments.quantization,
            draft_quantization=arguments.draft_quantization,
            block_size=arguments.block_size,
            revision=arguments.revision,
            draft_revision=arguments.draft_revision,
            progress=report,
            tensor_parallel_size=arguments.tensor_parallel_size,
        )


def _schedule(
    arguments: argparse.Namespace, concurrencies: list[int], work: "list[Work]"
) -> "Schedule":
    from jaxspec.measure.load import Schedule

    return filled(Schedule, vars(arguments) | {"work": work, "concurrencies": concurrencies})


def _engines(
    arguments: argparse.Namespace,
    opened: "Opened",
    methods: list[str],
    schedule: "Schedule",
    acceptances: dict[str, Acceptance],
    options: dict[str, Any],
) -> "dict[str, Engine]":
    from jaxspec.measure.engines import engines_for

    return engines_for(
        opened,
        methods,
        schedule.concurrencies,
        schedule.work,
        max_model_len=arguments.max_model_len,
        **options,
        synthetic_acceptance=next(iter(acceptances.values()), None),
    )


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engines' options that the flags set; their sizes follow from the requests."""
    numbers = ("page_size", "prefill_chunk", "prefill_budget", "prefill_beside_decoding")
    numbers += ("num_drafts", "confidence_threshold", "tensor_parallel_size")
    choices = ("exact", "adaptive", "driver", "kernels", "prefix_caching", "cache_dir")
    choices += ("fp8_activations", "exchange")
    return {name: getattr(arguments, name) for name in numbers + choices}


def _bar(total: int, name: str, unit: str) -> Any:
    """A progress bar, if stderr is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, disable=None, leave=False, file=sys.stderr)


def _about(arguments: argparse.Namespace, schedule: "Schedule", synthetic: bool) -> dict[str, Any]:
    """The models, options and machine of the measurement."""
    from jaxspec.measure.environment import command_line, environment
    from jaxspec.measure.results import title

    model = _model_in_words(arguments)
    return {
        "command": command_line("bench", arguments.argv),
        "environment": environment(),
        "title": title(model, arguments.dataset, bool(arguments.adaptive), schedule),
        "synthetic": synthetic,
        "arguments": {k: v for k, v in vars(arguments).items() if k != "argv"},
    }


def _model_in_words(arguments: argparse.Namespace) -> str:
    if arguments.model_shape:
        return f"{arguments.model_shape} (random weights)"
    name = "/".join(os.path.normpath(arguments.model).split(os.sep)[-2:])
    return f"{name} ({arguments.dtype})"


def _write(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if arguments.json:
        write_json(arguments.json, result)


def _draw(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    from jaxspec.measure.plots import draw_bench

    if arguments.plot:
        draw_bench(result, arguments.plot)
        cli.say(f"plot: {arguments.plot}")


def _profile(
    arguments: argparse.Namespace, profiling: Profiling, engine: "Engine", schedule: "Schedule"
) -> None:
    """Records one more pass of the last method, whose times are not reported."""
    from jaxspec.measure.environment import command_line
    from jaxspec.measure.load import Load, run_load
    from jaxspec.trace.profiling import profiled

    concurrency = arguments.profile_concurrency or max(schedule.concurrencies)
    about = {
        "command": command_line("bench", arguments.argv),
        "concurrency": concurrency,
        "prompt_tokens": [len(one.prompt) for one in schedule.work],
    }
    with profiled(engine, profiling, about, schedule.draws, cli.say):
        if profiling.profile_dir:
            run_load(engine, schedule.work[: max(2 * concurrency, 4)], Load(concurrency))


if __name__ == "__main__":
    sys.exit(main())
