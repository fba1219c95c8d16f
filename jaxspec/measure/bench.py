"""The benchmark: runs every contender on the same requests, taking turns pass by pass."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxspec.acceptance.synthetic import MixedAcceptance, SyntheticAcceptance
from jaxspec.console.progress import bar
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import Acceptance
from jaxspec.engine.plan.planning import synthetic_of
from jaxspec.measure.breakdown import part_ms
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.engines import compile_all
from jaxspec.measure.floor import copy_bytes_per_second, step_bytes
from jaxspec.measure.load import Load, Run, Schedule, Work, run_load
from jaxspec.measure.results import Row, add_speedups, row_of

ProgressBar = Callable[[int, str, str], AbstractContextManager[Any]]
"""Opens a progress bar with this total, name and unit."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method, and the synthetic acceptance it is measured with, if any."""

    method: str
    """A name in `METHODS`."""
    engine: Engine
    """The engine, which contenders share if they differ only in synthetic acceptance."""
    label: str = ""
    """Name of the synthetic acceptance, for example "GSM8K"; empty if there is only one."""
    synthetic: SyntheticAcceptance | MixedAcceptance | None = None
    """How acceptance is drawn; if None, the target decides which drafts are accepted."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.label}".rstrip()

    def set_acceptance(self) -> None:
        """Prepares the engine for this contender. Acceptance rates are inputs of its programs, so
        nothing is compiled again."""
        if self.synthetic is not None:
            self.engine.set_synthetic_acceptance(self.synthetic)


def contenders_of(
    engines: dict[str, Engine], acceptances: dict[str, Acceptance]
) -> list[Contender]:
    """A contender for each drafting method and acceptance, and a single one for plain decoding."""
    contenders = []
    for method, engine in engines.items():
        num_drafts = engine.plan.block_size - 1
        named = acceptances if method != "none" else {}
        synthetic = {label: synthetic_of(one, num_drafts) for label, one in named.items()}
        contenders += [Contender(method, engine, *pair) for pair in synthetic.items()]
        if not synthetic:
            contenders.append(Contender(method, engine))
    return contenders


def benchmark(
    contenders: Sequence[Contender],
    schedule: Schedule,
    bytes_per_second: float | None,
    breakdown: bool,
    progress_bar: ProgressBar,
) -> Iterator[dict[str, Any]]:
    """Runs the benchmark and yields all figures so far after every pass. If no bandwidth is given,
    that of a copy is measured, on accelerators only. `breakdown` also times the parts of a step and
    yields once more."""
    clock = CompileClock()
    bandwidth = bytes_per_second or _measured_bandwidth()
    warm_up(contenders, schedule, progress_bar)
    figures: dict[str, Any] = {
        "prompts": len(schedule.work),
        "prompt_tokens": [len(one.prompt) for one in schedule.work],
        "copy_bytes_per_second": bandwidth,
        "compile_s": clock.seconds,
    }
    for rows in compare(contenders, schedule, bandwidth, progress_bar):
        peak = contenders[0].engine.stats().peak_memory_bytes
        figures |= {"peak_memory_bytes": peak, "rows": rows}
        yield figures
    if breakdown:
        _add_parts(figures["rows"], contenders, schedule)
        yield figures


def _measured_bandwidth() -> float | None:
    """The bandwidth of large copies; None on a CPU. Its caches hold much of what a small model
    reads, so a step there may be faster than a copy of the same bytes."""
    return None if jax.default_backend() == "cpu" else copy_bytes_per_second()


def _add_parts(rows: Sequence[Row], contenders: Sequence[Contender], schedule: Schedule) -> None:
    engines = {one.method: one.engine for one in contenders}
    for row in rows:
        if row["method"] != "none":
            engine = engines[row["method"]]
            row["part_ms"] = part_ms(engine, row["concurrency"], schedule.mean_prompt)


def warm_up(contenders: Sequence[Contender], schedule: Schedule, progress_bar: ProgressBar) -> None:
    """Compiles and runs all programs, then runs every load with short replies."""
    one_per_engine = [*{id(one.engine): one for one in reversed(contenders)}.values()]
    total = len(one_per_engine) * len(schedule.concurrencies)
    with bar("loading or compiling programs", grows=True) as report:
        compile_all([one.engine for one in one_per_engine], schedule.draws, report)
    for one in one_per_engine:  # runs each program, most of which the short replies do not need
        one.engine.warm_up(params=max(schedule.work, key=lambda work: work.params.draws).params)
    with progress_bar(total, "warm-up", "") as progress:
        for one in one_per_engine:
            one.set_acceptance()
            for concurrency in schedule.concurrencies:
                run_load(one.engine, _short_replies(schedule, concurrency), Load(concurrency))
                progress.update(1)


def _short_replies(schedule: Schedule, concurrency: int) -> list[Work]:
    work = (list(schedule.work) * concurrency)[: max(concurrency, 2)]
    tokens = [min(8, one.params.max_tokens) for one in work]
    return [
        Work(one.prompt, dataclasses.replace(one.params, max_tokens=most))
        for one, most in zip(work, tokens)
    ]


def compare(
    contenders: Sequence[Contender],
    schedule: Schedule,
    bytes_per_second: float | None,
    progress_bar: ProgressBar,
) -> Iterator[list[Row]]:
    """Yields after every pass a row per contender and concurrency, over all passes so far."""
    clock = CompileClock()
    runs: dict[tuple[str, int], list[Run]] = {}
    compile_s: dict[tuple[str, int], float] = {}
    tokens = schedule.tokens_of_a_pass() * schedule.passes * len(contenders)
    with progress_bar(tokens, "measuring", "tok") as progress:
        for number in range(schedule.passes):
            for concurrency, one in _turns(contenders, schedule, number):
                before, key = clock.seconds, (one.name, concurrency)
                one.set_acceptance()
                load = Load(concurrency, schedule.request_rate, schedule.seed + number)
                work = schedule.requests_of_a_pass(concurrency)
                runs.setdefault(key, []).append(run_load(one.engine, work, load, progress.update))
                compile_s[key] = compile_s.get(key, 0.0) + clock.seconds - before
            rows = [
                _row(one, concurrency, runs[one.name, concurrency], bytes_per_second)
                | {"compile_s_while_measured": compile_s[one.name, concurrency]}
                for concurrency in schedule.concurrencies
                for one in contenders
            ]
            add_speedups(rows, "none")
            yield rows


def _turns(
    contenders: Sequence[Contender], schedule: Schedule, number: int
) -> Iterable[tuple[int, Contender]]:
    """Yields each concurrency and contender of a pass. Every other pass takes the contenders in
    reverse order, so that drift of the machine affects all equally."""
    for concurrency in schedule.concurrencies:
        for one in contenders if number % 2 == 0 else reversed(contenders):
            yield concurrency, one


def _row(
    one: Contender, concurrency: int, runs: Sequence[Run], bytes_per_second: float | None
) -> Row:
    least = step_bytes(one.engine.models, one.engine.params)
    named: Row = {"method": one.method, "acceptance_of": one.label}
    if one.synthetic is not None:
        named["drawn_length"] = one.synthetic.mean_length
    return named | row_of(concurrency, runs, least, bytes_per_second)
