"""Opens the engine of a command, and tells the user which models run on which device."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxspec.console.device import advice_about_gpu, device_in_words
from jaxspec.console.models import NamedModels, chosen_models, in_words, open_engine
from jaxspec.console.progress import Stopwatch, bar, bytes_in_words, seconds_in_words
from jaxspec.engine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.plan.options import EngineOptions

Say = Callable[[str], None]


def say_what_runs(
    named: NamedModels, say: Say, quiet: bool = False, devices: int = 1
) -> NamedModels:
    """Chooses the models, and tells the user which models run on which devices. If `quiet`, it does
    so only if the user named no target."""
    chosen = chosen_models(named)
    if not quiet or named.model is None:
        say(f"running on {device_in_words(devices)}: {in_words(named, chosen)}")
    if (advice := advice_about_gpu()) is not None:
        say(advice)
    return chosen


def opened_engine(
    chosen: NamedModels, options: "EngineOptions", say: Say, quiet: bool = False
) -> "Engine":
    """Opens the engine, with a progress bar while weights are read and a line afterwards."""
    read, watch = 0, Stopwatch()
    with bar("reading weights", "B", shown=not quiet) as show:

        def report(done: int, total: int) -> None:
            nonlocal read
            read = done
            show(done, total)

        engine = open_engine(chosen, options, report)
    if not quiet:
        say(f"weights: {bytes_in_words(read)} ready in {seconds_in_words(watch.seconds)}")
    return engine


def warmed_up(
    engine: "Engine",
    prompts: list[list[int]],
    params: SamplingParams,
    say: Say,
    quiet: bool = False,
) -> None:
    """Loads or compiles the programs that the first steps of these prompts need, with a progress
    bar and a line afterwards."""
    watch = Stopwatch()
    with bar("loading or compiling programs", shown=not quiet, grows=True) as report:
        count = engine.warm_up(prompts, params, report)
    if not quiet:
        say(f"programs: {count} ready in {seconds_in_words(watch.seconds)}")
