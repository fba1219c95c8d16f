"""`python -m jaxspec.generate`: text from prompts; the text to stdout, all else to stderr."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jaxspec import cli

if TYPE_CHECKING:
    from jaxspec import Engine, RequestOutput, SamplingParams
    from jaxspec.console.prompts import Render


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    arguments.given = given
    return cli.run(lambda: _generate(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxspec generate",
        usage="%(prog)s [--model MODEL] [--draft-model MODEL] [--prompt TEXT] [options]",
        description="Continues prompts with a Qwen3 target, and speculates with a DFlash drafter "
        "where one is given. Text goes to stdout, everything else to stderr.",
        allow_abbrev=False,
    )
    _add_models(parser.add_argument_group("models"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_engine(parser.add_argument_group("engine"))
    _add_output(parser.add_argument_group("output"))
    cli.add_profiling(parser.add_argument_group("profiling"))
    return parser


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="folder or hub id of the target (default: the demo pair)")
    group.add_argument("--draft-model", help="folder or hub id of the drafter")
    group.add_argument("--revision", help="branch, tag or commit of the target's hub id")
    group.add_argument(
        "--method",
        default="auto",
        help="dflash, ngram, dflash+ngram, none, or auto: dflash with a drafter, else none",
    )
    group.add_argument(
        "--block-size", type=int, help="tokens per block: 1 current + drafts (default: as trained)"
    )
    group.add_argument(
        "--dtype", help="bfloat16 or float32 (default: bfloat16; of the demo pair on a CPU float32)"
    )
    group.add_argument(
        "--draft-sampling",
        default="drawn",
        help="of sampled prompts: drawn (accepted more often), or likeliest (a seed says the same "
        "without a drafter; what --check needs)",
    )
    group.add_argument("--num-drafts", type=int, default=7, help="of ngram, per step (default: 7)")
    group.add_argument("--max-ngram", type=int, default=5, help="longest run of tokens looked up")
    group.add_argument("--min-ngram", type=int, default=1, help="shortest run of tokens looked up")
    group.add_argument("--ngram-match", default="recent", help="recent or earliest occurrence")
    group.add_argument(
        "--ngram-threshold",
        type=float,
        default=0.3,
        help="share of drafts to be accepted for a request to go on with ngram; 0: no gate",
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt", "-p", action="append", default=[], help="text, - for stdin; may be repeated"
    )
    group.add_argument("--prompt-file", help="lines of text or JSON lines; - for stdin")
    group.add_argument(
        "--prompt-ids", action="append", default=[], metavar="IDS", help="token ids: 1,2,3"
    )
    group.add_argument("--no-chat-template", action="store_true", help="take prompts as they are")
    group.add_argument("--system-prompt", help="system message of the chat template")
    group.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let the chat template open a thinking block (drafters are trained without)",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", "--max-new-tokens", type=int, default=128)
    group.add_argument("--temperature", "--temp", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--stop", action="append", default=[], help="text that ends the output")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--logprobs", type=int, help="top log probabilities per token, into --json")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-batch", type=int, help="prompts at once (default: all, up to 8)")
    group.add_argument("--max-model-len", type=int, default=4096, help="prompt and output together")
    group.add_argument("--page-size", type=int, default=64)
    group.add_argument("--num-pages", type=int, help="default: what the memory allows")
    group.add_argument("--memory-fraction", type=float, default=0.9)
    group.add_argument(
        "--exact", action="store_true", help="bits that do not depend on method or company"
    )
    group.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="choose in every step how many drafts of the drafter to verify",
    )
    group.add_argument("--driver", default="auto", help="auto, lockstep or overlapped")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help="one object per prompt; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no statistics")
    group.add_argument(
        "--check", action="store_true", help="decode plainly too and report the first difference"
    )
    group.add_argument("--debug", action="store_true", help="show where an error came from")


def _refuse_a_check_that_must_fail(arguments: argparse.Namespace) -> None:
    drawn = arguments.draft_sampling == "drawn" and not arguments.exact
    if arguments.check and drawn and arguments.temperature > 0 and arguments.method != "none":
        from jaxspec.errors import UsageError

        raise UsageError(
            "--check holds sampled text against plain decoding, but drafts are drawn, and a seed "
            "then says something else; add --draft-sampling likeliest"
        )


def _generate(arguments: argparse.Namespace) -> None:
    from jaxspec.console.files import check_writable

    _refuse_a_check_that_must_fail(arguments)
    check_writable(None if arguments.json == "-" else arguments.json)
    cli.prepare_profiling(arguments)

    from jaxspec.console.prompts import PromptSources, encoded, read_prompts
    from jaxspec.engine.requests.sampling_params import SamplingParams

    params = cli.filled(SamplingParams, vars(arguments))
    sources = PromptSources(
        tuple(arguments.prompt), arguments.prompt_file, tuple(arguments.prompt_ids)
    )
    prompts = read_prompts(sources, sys.stdin)

    from jaxspec.console.ahead import compile_ahead
    from jaxspec.console.compile_clock import CompileClock
    from jaxspec.console.models import chosen_models
    from jaxspec.console.report import summary

    arguments.model, arguments.draft_model, arguments.dtype = chosen_models(
        arguments.model, arguments.draft_model, arguments.dtype, cli.say
    )
    engine = _engine(arguments, len(prompts))
    ids = encoded(prompts, _chat(arguments, engine), engine.tokenizer.encode)
    begin = time.perf_counter()
    compile_ahead(engine, ids, params)
    compile_s = time.perf_counter() - begin
    profiled = _profiled(arguments, engine, params.draws)
    clock, begin = CompileClock(), time.perf_counter()
    with profiled:
        outputs = _stream_text(engine, ids, params, silent=arguments.json == "-")
        seconds = time.perf_counter() - begin
    if not arguments.quiet:
        cli.say(*summary(outputs, seconds - clock.seconds, compile_s + clock.seconds))
    if arguments.json:
        _write_json(arguments, prompts, outputs)
    _fail_if_any_failed(outputs)
    if arguments.check:
        _check(engine, ids, params, outputs)


def _engine(arguments: argparse.Namespace, prompts: int) -> "Engine":
    from jaxspec.engine.engine import Engine

    return Engine.from_pretrained(
        arguments.model,
        arguments.draft_model,
        method=arguments.method,
        dtype=arguments.dtype,
        block_size=arguments.block_size,
        revision=arguments.revision,
        max_batch=min(prompts, 8) if arguments.max_batch is None else arguments.max_batch,
        max_model_len=arguments.max_model_len,
        page_size=arguments.page_size,
        num_pages=arguments.num_pages,
        memory_fraction=arguments.memory_fraction,
        exact=arguments.exact,
        adaptive=arguments.adaptive,
        seed=arguments.seed,
        driver=arguments.driver,
        draft_sampling=arguments.draft_sampling,
        num_drafts=arguments.num_drafts,
        max_ngram=arguments.max_ngram,
        min_ngram=arguments.min_ngram,
        ngram_match=arguments.ngram_match,
        ngram_threshold=arguments.ngram_threshold,
    )


def _chat(arguments: argparse.Namespace, engine: "Engine") -> "Render | None":
    from jaxspec.console.prompts import chat_of

    template = None if arguments.no_chat_template else engine.chat_template
    return chat_of(template, arguments.system_prompt, arguments.enable_thinking)


def _profiled(
    arguments: argparse.Namespace, engine: "Engine", draws: bool
) -> AbstractContextManager[None]:
    from jaxspec.measure.environment import command_line
    from jaxspec.trace.profiling import Profiling, profiled

    asked = cli.filled(Profiling, vars(arguments))
    about = {"command": command_line("generate", arguments.given)}
    return profiled(engine, asked, about, draws, cli.say)


def _stream_text(
    engine: "Engine", prompts: list[list[int]], params: "SamplingParams", silent: bool
) -> "list[RequestOutput]":
    """Prints the first prompt's text as it comes; the others' follow, each when its turn comes."""
    outputs: dict[int, RequestOutput] = {}
    waiting = {index: "" for index in range(len(prompts))}
    turn = 0
    for event in engine.stream(prompts, params):
        waiting[event.index] += event.text
        if event.output is not None:
            outputs[event.index] = event.output
        while not silent and turn in waiting:
            sys.stdout.write(waiting[turn])
            waiting[turn] = ""
            if turn not in outputs:
                break
            sys.stdout.write("\n")
            turn += 1
        sys.stdout.flush()
    return [outputs[index] for index in sorted(outputs)]


def _write_json(
    arguments: argparse.Namespace, prompts: list[Any], outputs: "list[RequestOutput]"
) -> None:
    """A line per prompt, each with what is needed to make it again."""
    from jaxspec.console.files import write_text
    from jaxspec.console.report import output_object
    from jaxspec.measure.environment import environment

    names = ("model", "draft_model", "revision", "method", "dtype", "seed", "exact")
    made_with = environment() | {name: getattr(arguments, name) for name in names}
    lines = [
        json.dumps(output_object(prompt, output) | {"environment": made_with})
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    if arguments.json == "-":
        print(*lines, sep="\n")
    else:
        write_text(arguments.json, "\n".join(lines) + "\n")


def _fail_if_any_failed(outputs: "list[RequestOutput]") -> None:
    from jaxspec.errors import LoadError

    failed = [f"prompt {i}: {output.error}" for i, output in enumerate(outputs) if output.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(outputs)} prompts failed; {failed[0]}")


def _check(
    engine: "Engine",
    prompts: list[list[int]],
    params: "SamplingParams",
    outputs: "list[RequestOutput]",
) -> None:
    """Raises where plain decoding gives other tokens."""
    from jaxspec.console.check import differences_from_plain, in_words
    from jaxspec.errors import LoadError

    differences = differences_from_plain(engine, prompts, params, outputs)
    cli.say(*(in_words(difference, engine.tokenizer.decode) for difference in differences))
    if differences:
        raise LoadError(f"{len(differences)} of {len(prompts)} outputs differ from plain decoding")
    cli.say(f"check: all {len(prompts)} outputs equal plain decoding")


if __name__ == "__main__":
    sys.exit(main())
