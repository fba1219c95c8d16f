"""A whole benchmark in figures: the memory's bandwidth, everybody's rows, and what they cost."""

from collections.abc import Sequence
from typing import Any

from jaxspec.measure.breakdown import part_ms
from jaxspec.measure.comparison import Bar, Contender, Schedule, compare, warm_up
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.floor import copy_bytes_per_second


def measured(
    contenders: Sequence[Contender],
    schedule: Schedule,
    bytes_per_second: float | None,
    breakdown: bool,
    bar: Bar,
) -> dict[str, Any]:
    """Without a bandwidth that of a copy is taken; `breakdown` times the parts of steps as well."""
    clock = CompileClock()
    bandwidth = bytes_per_second or copy_bytes_per_second()
    warm_up(contenders, schedule, bar)
    compile_s = clock.seconds
    rows = compare(contenders, schedule, bandwidth, bar)
    if breakdown:
        _add_parts(rows, contenders, schedule)
    return {
        "prompts": len(schedule.work),
        "prompt_tokens": [len(one.prompt) for one in schedule.work],
        "copy_bytes_per_second": bandwidth,
        "compile_s": compile_s,
        "peak_memory_bytes": contenders[0].engine.stats().peak_memory_bytes,
        "rows": rows,
    }


def _add_parts(
    rows: list[dict[str, Any]], contenders: Sequence[Contender], schedule: Schedule
) -> None:
    engines = {one.method: one.engine for one in contenders}
    for row in rows:
        if row["method"] != "none":
            engine = engines[row["method"]]
            row["part_ms"] = part_ms(engine, row["concurrency"], schedule.mean_prompt)
