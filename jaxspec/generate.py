"""`python -m jaxspec.generate`: continues prompts; prints text to stdout, all else to stderr."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec import cli
from jaxspec.console.files import check_writable, write_text
from jaxspec.console.flags import add_flags, filled
from jaxspec.console.models import NamedModels, check_models
from jaxspec.console.parser import Parser
from jaxspec.console.processes import Together, completed, join
from jaxspec.console.texts import is_terminal
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import LoadError, UsageError
from jaxspec.proposers.methods import METHODS
from jaxspec.trace.options import Profiling

if TYPE_CHECKING:
    from jaxspec import Engine, RequestOutput
    from jaxspec.console.clocks import DecodeClock
    from jaxspec.console.progress import Stopwatch
    from jaxspec.console.prompts import Prompt, Render
    from jaxspec.console.report import RunTimes
    from jaxspec.console.texts import Texts

NAMED_IN_JSON = (
    "model",
    "draft_model",
    "revision",
    "draft_revision",
    "method",
    "dtype",
    "seed",
    "exact",
)
"""The flags whose values are in every line of --json."""


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(argv)
    arguments.argv = argv
    return cli.run(lambda: _generate(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec generate",
        usage="%(prog)s [--model MODEL] [--draft-model MODEL] [--prompt TEXT] [options]",
        description="Continues prompts with a Qwen3 or Qwen3.5 model, sped up by a drafter if "
        "one is named. Text goes to stdout, everything else to stderr. In a terminal, text follows "
        "its prompt.",
    )
    cli.add_models(parser.add_argument_group("models"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_speculation(parser.add_argument_group("speculation"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_engine(parser.add_argument_group("engine"))
    _add_output(parser.add_argument_group("output"))
    cli.add_profiling(parser.add_argument_group("profiling"))
    return parser


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt",
        "-p",
        action="append",
        default=[],
        metavar="TEXT",
        help="Text, - for stdin; may be repeated (default: none)",
    )
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="Prompts as lines of text or JSON lines; - for stdin (default: none)",
    )
    group.add_argument(
        "--prompt-ids",
        action="append",
        default=[],
        metavar="IDS",
        help="Token ids: 1,2,3; may be repeated (default: none)",
    )
    group.add_argument("--no-chat-template", action="store_true", help="Use prompts as they are")
    group.add_argument("--system-prompt", metavar="TEXT", help="System message (default: none)")
    group.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Let the chat template open a thinking block; drafters are trained without one",
    )


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    add_flags(group, EngineOptions, "method", choices=("auto", *METHODS), metavar=None)
    add_flags(group, EngineOptions, "adaptive", "draft_sampling", "confidence_threshold")
    add_flags(group, EngineOptions, "num_drafts", "max_ngram", "min_ngram")
    add_flags(group, EngineOptions, "ngram_match", "ngram_threshold")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add_flags(group, SamplingParams, "max_tokens", also="--max-new-tokens")
    add_flags(group, SamplingParams, "temperature", also="--temp")
    add_flags(group, SamplingParams, "top_p", "top_k", "min_p")
    add_flags(group, EngineOptions, "seed", help="Seed of every prompt (default: %(default)s)")
    add_flags(group, SamplingParams, "stop", action="append", default=None, metavar="TEXT")
    add_flags(group, SamplingParams, "ignore_eos")
    top = "Write log probabilities of the N most likely tokens per token to --json (default: none)"
    add_flags(group, SamplingParams, "logprobs", help=top)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    at_once = f"Prompts that run at once (default: all, up to {EngineOptions.max_batch})"
    add_flags(group, EngineOptions, "max_batch", default=None, help=at_once)
    add_flags(group, EngineOptions, "max_model_len", "page_size", "num_pages", "memory_fraction")
    add_flags(
        group,
        EngineOptions,
        "prefix_caching",
        "num_snapshots",
        "exact",
        "driver",
        "kernels",
        "fp8_activations",
    )
    add_flags(group, EngineOptions, "tensor_parallel_size", "exchange", "step_timeout")
    add_flags(group, Together, "coordinator", metavar="HOST:PORT")
    add_flags(group, Together, "num_processes", "process_id")
    cli.add_kept_programs(group)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", metavar="FILE", help="One object per prompt; - for stdout (default: none)"
    )
    group.add_argument(
        "--quiet",
        "-q",
        action="store_true",
        help="Print no progress, no statistics, and no headings of several prompts",
    )
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Measure plain decoding of the same prompts as well, for a few seconds, and say how "
        "many times as fast drafting was (default: only for the demo pair)",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="Also decode without drafts, and report the first difference of each prompt",
    )
    cli.add_debug(group)


def _generate(arguments: argparse.Namespace) -> None:
    check_writable(None if arguments.json == "-" else arguments.json)
    profiling = cli.prepared_profiling(vars(arguments))
    params, options = _params_and_options(arguments)
    prompts = arguments.prompts = _prompts(arguments)
    _refuse_flags_without_effect(arguments, prompts)
    named = filled(NamedModels, vars(arguments))
    check_models(named, (options.method,))
    together = completed(filled(Together, vars(arguments)))
    _refuse_what_processes_cannot_share(together, arguments, options)
    if arguments.max_batch is None:
        options = dataclasses.replace(options, max_batch=min(len(prompts), options.max_batch))

    # Nothing above this imports jax, so that errors in the flags are reported at once.
    arguments.prints = join(together)
    arguments.quiet |= not arguments.prints
    from jaxspec.console.progress import Stopwatch
    from jaxspec.console.prompts import encoded

    since_start = Stopwatch()
    engine = _engine(arguments, named, options)
    encode = engine.tokenizer.encode if engine.tokenizer else _refuse_text
    ids = encoded(prompts, _chat(arguments, engine), encode)
    outputs = _outputs(arguments, engine, ids, params, profiling, since_start)
    if arguments.json and arguments.prints:
        _write_json(arguments, engine, prompts, outputs)
    _fail_if_any_failed(outputs)
    if arguments.check:
        _check(engine, ids, params, outputs)


def _params_and_options(arguments: argparse.Namespace) -> tuple[SamplingParams, EngineOptions]:
    """Sampling parameters and engine options. Wrong ones are refused before jax is imported."""
    flags = vars(arguments)
    params, options = filled(SamplingParams, flags), filled(EngineOptions, flags)
    options = dataclasses.replace(options, compile_ahead=False)  # all prompts are known
    if arguments.check:
        _refuse_a_check_that_must_fail(options, params)
    return params, options


def _refuse_a_check_that_must_fail(options: EngineOptions, params: SamplingParams) -> None:
    drawn = options.draft_sampling == "drawn" and not options.exact
    if drawn and params.temperature > 0 and options.method != "none":
        raise UsageError(
            "--check compares sampled text with plain decoding, but with drawn drafts a seed gives "
            "another text; add --draft-sampling likeliest"
        )


def _refuse_flags_without_effect(
    arguments: argparse.Namespace, prompts: "Sequence[Prompt]"
) -> None:
    """Refuses flags that would have no effect, before a model is read."""
    if arguments.logprobs is not None and not arguments.json:
        raise UsageError("--logprobs are written to --json only; add --json FILE, or - for stdout")
    chat = {
        "--system-prompt": arguments.system_prompt,
        "--enable-thinking": arguments.enable_thinking,
    }
    for flag in (flag for flag, value in chat.items() if value):
        if arguments.no_chat_template:
            raise UsageError(f"{flag} is for a chat template; leave out --no-chat-template")
        if not any(isinstance(prompt, str) for prompt in prompts):
            raise UsageError(f"{flag} is for prompts of text, and all are token ids; leave it out")


def _refuse_what_processes_cannot_share(
    together: Together, arguments: argparse.Namespace, options: EngineOptions
) -> None:
    if together.coordinator is None:
        return
    if options.tensor_parallel_size == 1:
        raise UsageError(
            "several processes share one model; add --tensor-parallel-size with the number of all "
            "their devices"
        )
    if arguments.compare:
        raise UsageError("--compare is for one process; leave it out")
    arguments.compare = False  # how long it measures would depend on each process's clock


def _prompts(arguments: argparse.Namespace) -> "list[Prompt]":
    from jaxspec.console.prompts import PromptSources, read_prompts

    texts, ids = tuple(arguments.prompt), tuple(arguments.prompt_ids)
    return read_prompts(PromptSources(texts, arguments.prompt_file, ids), sys.stdin)


def _engine(arguments: argparse.Namespace, named: NamedModels, options: EngineOptions) -> "Engine":
    from jaxspec.console.opening import opened_engine, say_what_runs

    devices = options.tensor_parallel_size
    chosen = say_what_runs(named, cli.say, arguments.quiet, devices)
    arguments.model, arguments.draft_model = chosen.model, chosen.draft_model
    arguments.dtype = chosen.dtype
    if arguments.compare is None:
        arguments.compare = named.is_demo
    return opened_engine(chosen, options, cli.say, arguments.quiet)


def _refuse_text(text: str, *, add_special_tokens: bool) -> list[int]:
    raise UsageError(
        "a prompt is text and the model's folder has no tokenizer.json; give --prompt-ids, or put "
        "the tokenizer's files beside the weights"
    )


def _chat(arguments: argparse.Namespace, engine: "Engine") -> "Render | None":
    from jaxspec.console.prompts import chat_of

    template = None if arguments.no_chat_template else engine.chat_template
    return chat_of(template, arguments.system_prompt, arguments.enable_thinking)


def _outputs(
    arguments: argparse.Namespace,
    engine: "Engine",
    ids: list[list[int]],
    params: SamplingParams,
    profiling: Profiling,
    since_start: "Stopwatch",
) -> "list[RequestOutput]":
    """Compiles, generates, and prints first the text and then the statistics."""
    from jaxspec.console.clocks import DecodeClock, ProgramTimer
    from jaxspec.console.opening import warmed_up
    from jaxspec.console.progress import Stopwatch
    from jaxspec.console.report import RunTimes, summary
    from jaxspec.measure.environment import command_line
    from jaxspec.trace.profiling import profiled

    warmed_up(engine, ids, params, cli.say, arguments.quiet)
    about = {"command": command_line("generate", arguments.argv)}
    recording = profiled(engine, profiling, about, params.draws, cli.say)
    timer = ProgramTimer(engine)
    clock, start_s, watch = DecodeClock(lambda: timer.seconds), since_start.seconds, Stopwatch()
    with recording:
        outputs = _stream_text(arguments, engine, ids, params, clock)
        seconds = watch.seconds - timer.seconds
    if not arguments.quiet:
        times = RunTimes(seconds, start_s, timer.programs, timer.seconds, clock.tokens_per_s)
        times = _compared(arguments, engine, ids, params, outputs, times)
        blank = [""] if is_terminal(sys.stdout) else []  # below the text
        cli.say(*blank, *summary(outputs, times), *_kernels(arguments, engine))
    return outputs


def _compared(
    arguments: argparse.Namespace,
    engine: "Engine",
    ids: list[list[int]],
    params: SamplingParams,
    outputs: "list[RequestOutput]",
    times: "RunTimes",
) -> "RunTimes":
    """Adds the speed of plain decoding to the times, if it is wanted and the run can be compared
    with it."""
    from jaxspec.console.progress import bar
    from jaxspec.measure.plain import plain_decoding

    drafted = any(output.stats.num_spec_steps for output in outputs)
    failed = any(output.error for output in outputs)
    if not arguments.compare or not drafted or failed or times.tokens_per_s is None:
        return times
    with bar("measuring plain decoding") as report:
        plain = plain_decoding(engine, ids, params, report)
    return dataclasses.replace(
        times, plain_tokens_per_s=plain.tokens_per_s, plain_tokens=plain.tokens
    )


def _kernels(arguments: argparse.Namespace, engine: "Engine") -> list[str]:
    """The line that names the kernels. On a CPU there are none, so the line is left out unless the
    user has chosen kernels."""
    import jax

    from jaxspec.models.kernels import kernels_line

    chose = arguments.kernels != EngineOptions.kernels, arguments.exchange != EngineOptions.exchange
    says_something = jax.default_backend() != "cpu" or any(chose)
    return [kernels_line(engine.kernels)] if says_something else []


def _stream_text(
    arguments: argparse.Namespace,
    engine: "Engine",
    prompts: list[list[int]],
    params: SamplingParams,
    clock: "DecodeClock",
) -> "list[RequestOutput]":
    """Generates, and prints the texts in the order of the prompts, the first unfinished one while
    it is generated."""
    is_shown = arguments.prints and arguments.json != "-"
    texts = _texts(arguments, engine, prompts) if is_shown else None
    outputs: dict[int, RequestOutput] = {}
    if texts is not None:
        texts.begin()
    for event in engine.stream(prompts, params, errors="return"):
        clock.saw(event)
        if event.output is not None:
            outputs[event.index] = event.output
        if texts is not None:
            texts.add(event.index, event.text, is_last=event.output is not None)
    return [outputs[index] for index in sorted(outputs)]


def _texts(arguments: argparse.Namespace, engine: "Engine", prompts: list[list[int]]) -> "Texts":
    """The writer of the texts. It shows prompts as the user wrote them, not as rendered chats."""
    from jaxspec.console.texts import Texts

    answers = engine.chat_template is not None and not arguments.no_chat_template
    decode = str if engine.tokenizer is None else engine.tokenizer.decode
    shown = [
        prompt if isinstance(prompt, str) else decode(ids)
        for prompt, ids in zip(arguments.prompts, prompts, strict=True)
    ]
    return Texts(shown, continues=not answers, headings=not arguments.quiet)


def _write_json(
    arguments: argparse.Namespace,
    engine: "Engine",
    prompts: "list[Prompt]",
    outputs: "list[RequestOutput]",
) -> None:
    from jaxspec.console.report import output_lines
    from jaxspec.measure.environment import environment, kernels

    made_with = environment() | {name: getattr(arguments, name) for name in NAMED_IN_JSON}
    made_with["kernels"] = kernels(engine)
    lines = output_lines(prompts, outputs, made_with)
    if arguments.json == "-":
        print(*lines, sep="\n")
    else:
        write_text(arguments.json, "\n".join(lines) + "\n")


def _fail_if_any_failed(outputs: "list[RequestOutput]") -> None:
    failed = [f"prompt {i}: {output.error}" for i, output in enumerate(outputs) if output.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(outputs)} prompts failed; {failed[0]}")


def _check(
    engine: "Engine",
    prompts: list[list[int]],
    params: SamplingParams,
    outputs: "list[RequestOutput]",
) -> None:
    """Raises a LoadError if plain decoding gives other tokens."""
    from jaxspec.console.check import differences_from_plain, in_words

    differences = differences_from_plain(engine, prompts, params, outputs)
    decode = engine.tokenizer.decode if engine.tokenizer else str
    cli.say(*(in_words(difference, decode) for difference in differences))
    if differences:
        raise LoadError(f"{len(differences)} of {len(prompts)} outputs differ from plain decoding")
    cli.say(f"check: all {len(prompts)} outputs equal plain decoding")


if __name__ == "__main__":
    sys.exit(main())
