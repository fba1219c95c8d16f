"""The tables of the notes are what their results files say, row by row.

Each function makes the rows of one page's tables out of the files that the page cites. Tables of
older code, which have no file of this version, are left out by not being among the first.
"""

import json
import pathlib
import re
import statistics
from typing import Any

import pytest

from pallas_kernels.paged_attention import portable
from pallas_kernels.paged_attention.blocks import Shape, choose_sizes

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
TABLE = re.compile(r"^\|.+\|\n\|[-|]+\|\n((?:\|.+\|\n?)+)", re.M)
SLOTS = (1, 4, 8, 16, 32)
PEERS = ("vLLM 0.26.0", "SGLang 0.5.16")
BOTH_8B, BOTH_4B = (f"qwen3-{size}-fp8-activations-drafter" for size in ("8b", "4b"))
"""Files of steps with activations and drafter in 8 bits."""

Table = list[list[str]]
"""Rows of cells, without the header and without bold marks."""


def results(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def tables(page: str) -> list[Table]:
    bodies = TABLE.findall((DOCS / "notes" / f"{page}.md").read_text())
    return [
        [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in body.splitlines()]
        for body in bodies
    ]


def bench() -> list[Table]:
    tables = [table for size in ("8b", "4b") for table in bench_of(results(f"bench-{size}-h100"))]
    in_8_bits, in_16_bits = results("bench-8b-fp8-h100"), results("bench-8b-h100")
    slots = (1, 8, 32)
    tables += bench_of(in_8_bits, slots, PEERS[:1])
    return [*tables, passes_in_8_and_16_bits(in_8_bits, in_16_bits, slots)]


def passes_in_8_and_16_bits(
    in_8_bits: dict[str, Any], in_16_bits: dict[str, Any], slots: tuple[int, ...]
) -> Table:
    both = [
        {(row["acceptance_of"], row["concurrency"]): speed_of(row) for row in file["rows"]}
        for file in (in_8_bits, in_16_bits)
    ]
    cell = lambda speed, other: f"{speed:.0f} and {other:.0f}, {speed / other:.2f}x"
    cells = lambda name: [cell(*(file[name, count] for file in both)) for count in slots]
    return [[name or "plain", *cells(name)] for name in ("", "GSM8K", "MT-Bench")]


def bench_of(
    file: dict[str, Any], counts: tuple[int, ...] = SLOTS, peers: tuple[str, ...] = PEERS
) -> list[Table]:
    """Steps, steady decode and whole passes of a model."""
    steady = {
        (row["system"], row["mode"], row["acceptance_of"], row["concurrency"]): row
        for row in file["steady_decode"]
    }
    lengths = {
        row["acceptance_of"]: row["acceptance_length"]
        for row in file["steady_decode"]
        if row["acceptance_of"]
    }
    plain = [steady["jaxspec", "plain", "", slots] for slots in counts]
    any_length = next(iter(lengths))
    drafting = [steady["jaxspec", "dflash", any_length, slots] for slots in counts]
    steps = [
        ["plain, jaxspec", *(f"{row['step_ms']:.2f}" for row in plain)],
        ["DFlash, jaxspec", *(f"{row['step_ms']:.2f}" for row in drafting)],
    ]
    speeds = [["plain, jaxspec", *(f"{row['tokens_per_s']:.0f}" for row in plain)]]
    for name, length in lengths.items():
        ours = [steady["jaxspec", "dflash", name, slots]["tokens_per_s"] for slots in counts]
        cells = [
            f"{speed:.0f}, {speed / alone['tokens_per_s']:.2f}x"
            for speed, alone in zip(ours, plain, strict=True)
        ]
        speeds.append([f"{name} {length:.2f}, jaxspec", *cells])
        for peer in peers:
            theirs = [steady[peer, "dflash", name, slots]["tokens_per_s"] for slots in counts]
            speeds.append([peer, *(f"{speed:.0f}" for speed in theirs)])
    passes = {(row["acceptance_of"], row["concurrency"]): row for row in file["rows"]}
    whole = [["plain", *(f"{speed_of(passes['', slots]):.0f}" for slots in counts)]]
    for name in lengths:
        whole.append([name, *(pass_cell(passes[name, slots]) for slots in counts)])
    return [steps, speeds, whole]


def speed_of(row: dict[str, Any]) -> float:
    return row["output_tokens_per_s"]["median"]


def pass_cell(row: dict[str, Any]) -> str:
    drawn = row["speculation"]["mean_acceptance_length"]
    return f"{speed_of(row):.0f}, {row['speedup']['median']:.2f}x ({drawn:.2f})"


def steps() -> list[Table]:
    ours, other = results("steps-8b-h100")["rows"], results("steps-8b-one-step-h100")["rows"]
    again = results("steps-8b-again-h100")["rows"]
    drafting = bench_of(results("bench-8b-h100"))[0][1]
    milliseconds = lambda rows, key: [f"{row[key]:.2f}" for row in rows]
    runs = [
        ["the table", *milliseconds(ours, "dflash_engine_ms")],
        ["the bench", *drafting[1:]],
        ["the other machine", *milliseconds(other, "dflash_engine_ms")],
        ["the third machine", *milliseconds(again, "dflash_engine_ms")],
    ]
    loop = [
        [f"{what}, {where}", *milliseconds(ours, f"{method}_{clock}_ms")]
        for what, method in (("iteration", "dflash"), ("plain decoding", "plain"))
        for where, clock in (("the program", "device"), ("in the loop", "engine"))
    ]
    return [runs, loop]


def spans() -> list[Table]:
    policies = ("plain", "width 4", "width 8", "width 16", "adaptive")
    return [
        [
            [
                row["phase"],
                *(f"{row['tokens_per_s'][policy]:.0f}" for policy in policies),
                f"{100 * row['of_the_best_fixed']:.1f} %",
                ", ".join(f"{width}: {count}" for width, count in row["widths"].items()),
            ]
            for row in results("spans-h100")["phases"]
        ]
    ]


def verify_budget() -> list[Table]:
    """What any policy could give, the least step times, and the simulated engine."""
    report = results("verify-budget")
    batches = {one["batch"]: one["rows"] for one in report["batches"]}
    needed = [
        [str(row["verified"]), f"{row['emitted']:.1f}", f"{row['longest_ms']:.2f}"]
        for row in batches[32]
    ]
    least = [
        [
            f"{batch}, {row['verified']}",
            f"{row['least_ms']:.2f}",
            f"{row['of_whole_blocks']:.2f}",
        ]
        for batch, rows in batches.items()
        for row in rows
        if "least_ms" in row and row["verified"] < 16 * batch
    ]
    loads = {one["batch"]: one["loads"] for one in report["engine"]}
    shown = [(batch, "6.54+4.24") for batch in (8, 16)]
    shown += [(32, load) for load in loads[32]]
    engine = [
        [
            f"{batch}, {load}",
            *(f"{loads[batch][load][of]:.2f}" for of in ("of_whole_blocks", "of_best_fixed")),
        ]
        for batch, load in shown
    ]
    before = measured_before(), *widths_between(), *with_learned_costs()
    return [needed, least, engine, *before]


def even_steps() -> Table:
    """Tokens per second of all policies and of vLLM, and the widths of the steps."""
    policies = "width 4", "width 8", "width 16", "adaptive"
    return [
        [
            row["phase"].replace(" x ", ", "),
            *(f"{row['tokens_per_s'][policy]:.0f}" for policy in policies),
            f"{row['peers_per_s']['vLLM 0.26.0']:.0f}",
            f"{row['of_width_16']:.2f}",
            f"{100 * row['of_the_best_fixed']:.1f} %",
            ", ".join(f"{width}: {count}" for width, count in row["widths"].items()),
        ]
        for row in results("spans-8b-even-h100")["phases"]
    ]


def with_learned_costs() -> list[Table]:
    """Policies, and costs before requests come and in the loop."""
    file = results("spans-8b-costs-h100")
    sizes = "16 x 16", "32 x 8", "32 x 16"
    costs = [
        [
            size.replace(" x ", ", "),
            *(f"{file[of][size]:.2f}" for of in ("costs_ms", "costs_in_loop_ms")),
        ]
        for size in sizes
    ]
    return [[policies_row(row) for row in file["phases"]], costs]


def measured_before() -> Table:
    return [policies_row(row) for row in results("spans-8b-mixed-h100")["phases"]]


def widths_between() -> list[Table]:
    """Steps of 32 requests by their width, with the most that they can give, and policies."""
    file = results("spans-8b-widths-h100")
    widths = 8, 9, 10, 11, 12, 14, 16
    milliseconds = {width: file["costs_ms"][f"32 x {width}"] for width in widths}
    emitted = {
        row["verified"]: row["emitted"]
        for one in results("verify-budget")["batches"]
        if one["batch"] == 32
        for row in one["rows"]
    }
    per_ms = lambda width: emitted[32 * width] / milliseconds[width]
    times = [
        [
            str(width),
            str(32 * width),
            f"{milliseconds[width]:.2f}",
            f"{per_ms(width) / per_ms(16):.2f}",
        ]
        for width in widths
    ]
    return [times, [policies_row(row) for row in file["phases"]]]


def policies_row(row: dict[str, Any]) -> list[str]:
    """Tokens per second of two fixed widths, of chosen ones, and of vLLM."""
    speeds = row["tokens_per_s"]
    return [
        row["phase"].replace(" x ", ", "),
        *(f"{speeds[policy]:.0f}" for policy in ("width 8", "width 16", "adaptive")),
        f"{row['of_width_16']:.2f}",
        f"{row['peers_per_s']['vLLM 0.26.0']:.0f}",
    ]


def prompt_lookup() -> list[Table]:
    return [[lookup_row(row) for row in results("ngram-h100")["rows"]]]


def lookup_row(row: dict[str, Any]) -> list[str]:
    wide, ratio = row["wide_steps"], row["ratio"]
    return [
        row["load"],
        f"{row['plain_step_ms']:.2f}",
        f"{row['ngram_step_ms']:.2f}",
        "all" if wide == 1 else f"{100 * wide:.0f} %",
        f"{ratio['prose']:.3f}" if "prose" in ratio else "",
        f"{ratio['repetitive']:.2f}" if "repetitive" in ratio else "",
    ]


def kernels() -> list[Table]:
    chain = [
        [
            row["case"].removesuffix(" tokens"),
            *(f"{row[key]:.1f}" for key in ("floor_us", "xla_us", "mosaic_us")),
            f"{100 * row['share_of_bandwidth']:.0f} %",
        ]
        for row in results("dense-chain-h100")["rows"]
    ]
    write = [
        [
            row["case"].partition(" tokens")[0].replace("x", " x "),
            f"{row['floor_us']:.2f}",
            f"{row['xla_us']:.1f}",
            f"{row['mosaic_us']:.1f}",
        ]
        for row in results("qkv-write-h100")["rows"]
    ]
    return [attention(), chain, write]


def attention() -> Table:
    rows = {row["case"]: row for row in results("kernels-h100")["rows"]}
    contexts = [f"{slots}x{context}" for slots in (1, 8, 32) for context in (1024, 4096)]
    queries = {"q16 causal": "16 causal", "q16 full": "16 full", "q1 causal": "1"}
    cases = [(context, query) for query in queries for context in contexts]
    table = []
    for context, query in cases:
        wide, narrow = (rows[f"{context} {query} page {size}"] for size in (64, 16))
        shown = [
            f"{context.replace('x', ' x ')}, {queries[query]}",
            f"{wide['floor_us']:.1f}",
            f"{wide['mosaic_us']:.1f}",
            f"{100 * wide['share_of_bandwidth']:.0f} %",
            f"{narrow['mosaic_us']:.1f}",
            f"{narrow['peer_us']:.1f}",
        ]
        table.append(shown)
    wide, narrow = (rows[f"8x2048 q512 causal page {size}"] for size in (64, 16))
    rate = f"{wide['tflop_s']:.0f} TFLOP/s"
    prefill = ["", f"{wide['mosaic_us']:.1f}", rate, f"{narrow['mosaic_us']:.1f}", ""]
    return [*table, ["8 x 2048, 512 (prefill)", *prefill]]


def start() -> list[Table]:
    """The column of today, and the phases."""
    bars = ("20", "4", "15", "25", "6")
    before = results("start-before-h100")["starts"][0]["first_token_s"]
    same = f"{before:.1f}, as nothing was kept"
    then = (f"{before:.1f}", same, same, "not ended after 170", "the same")
    starts = results("start-h100")["starts"]
    phases = ("imports", "device", "engine", "warm_up", "first_token", "rest")
    names = [
        one["case"]
        .replace("nothing cached", "nothing kept")
        .replace("a changed line", "a line of one layer edited")
        for one in starts
    ]
    return [
        [
            [name, bar, f"{one['first_token_s']:.1f}", earlier]
            for name, bar, one, earlier in zip(names, bars, starts, then, strict=True)
        ],
        [
            [name, *(f"{one['phases_s'][phase]:.2f}" for phase in phases)]
            for name, one in zip(names, starts, strict=True)
        ],
    ]


def candidates() -> list[Table]:
    """0 stands for all tokens."""
    return [
        [
            [
                str(row["candidates"] or "all"),
                str(row["steps"]),
                f"{row['mean_acceptance_length']:.3f}",
            ]
            for row in results("dspark-candidates-cpu")["rows"]
        ]
    ]


def load() -> list[Table]:
    """Whole passes, what happens beside a long prompt, and bursts; before, and now."""
    files = results("simulated-load-before"), results("simulated-load")
    passes = [
        [str(before["slots"]), *(share_of_ideal(row) for row in (before, now))]
        for before, now in zip(*(file["whole_pass"] for file in files), strict=True)
    ]
    beside = [
        [name if file is files[0] else "now", *(f"{row[key]:.1f}" for row in of_file)]
        for name, key in (
            ("longest gap between their tokens, before", "gap_ms_max"),
            ("first token of the short prompt, before", "short_first_token_ms"),
            ("first token of the long prompt, before", "long_first_token_ms"),
        )
        for file in files
        for of_file in [file["beside_a_long_prompt"]]
    ]
    waits = [[f"{row['first_token_ms_max']:.1f}" for row in file["burst"]] for file in files]
    names = "32 of them, nobody decodes", "16 of them, 16 requests decode"
    bursts = [list(row) for row in zip(names, *waits, strict=True)]
    return [passes, beside, bursts, *in_decode_steps(), serving(), benched(), parts_of_a_pass()]


def benched() -> Table:
    """Whole passes of the bench at 32 slots, and what the same machine's times allow."""
    rows = []
    for name, run in ("before", "8b-32-before-h100"), ("now", "8b-32-h100"):
        [row] = results(f"bench-{run}")["rows"]
        speed, first = row["output_tokens_per_s"], row["ttft_ms"]
        speeds = [f"{speed['median']:.0f}", f"{speed['min']:.0f} to {speed['max']:.0f}"]
        times = [f"{row['step_ms']['p50']:.2f}", f"{first['p50']:.1f}", f"{first['p99']:.1f}"]
        ideal = ideal_of_passes(row, results(f"steps-{run}"))
        share = [f"{ideal:.0f}", f"{100 * speed['median'] / ideal:.1f}"]
        rows.append([name, *speeds, *times, *share])
    return rows


def ideal_of_passes(row: dict[str, Any], steps: dict[str, Any]) -> float:
    """Tokens per second if prompts were read as fast as in a large prefill and every step had all
    slots decoding."""
    done, prefill = row["speculation"], steps["prefill"]
    [step] = [one["dflash_engine_ms"] for one in steps["rows"] if one["concurrency"] == 32]
    reading = prefill["ms"] / (prefill["slots"] * prefill["tokens"]) * done["prompt_tokens"]
    decoded = done["generation_tokens"] - done["num_requests"]
    decoding = decoded / (32 * done["mean_acceptance_length"]) * step
    return 1e3 * done["generation_tokens"] / (reading + decoding)


def parts_of_a_pass() -> Table:
    """Milliseconds of the second pass, with one batch size of decode steps and with all."""
    parts = []
    for variant in results("pass-8b-h100")["variants"][:2]:
        one = variant["passes"][1]
        sums = {name: program["sum_ms"] for name, program in one["programs"].items()}
        full = sums.pop("decode 32")
        prompts = sum(ms for name, ms in sums.items() if name.startswith("prefill"))
        smaller = sum(sums.values()) - prompts
        inside = full + smaller + prompts + one["idle_ms"]
        parts.append([full, smaller, prompts, one["idle_ms"], one["ms"] - inside, one["ms"]])
    names = "decode steps of 32", "smaller decode steps", "prompts", "idle between programs"
    names += "before the first and after the last", "all"
    shown = [[f"{ms:.1f}" for ms in of_variant] for of_variant in parts]
    return [list(row) for row in zip(names, *shown, strict=True)]


def serving() -> Table:
    """What the server adds, gaps, and first bytes at every rate of arrivals."""
    file = results("serving-curve-h100")
    alone, server = file["in_process"], file["server"]
    rows = [
        ("a step of 32 streams, in the library", alone["step_ms"]),
        ("in the server", server["step_ms"]),
        ("first token of a lone request, in the library", alone["first_token_ms"]),
        ("first byte from the server", server["first_byte_ms"]),
        ("gaps of 16 streams while two prompts come every second", file["gaps"]),
    ]
    at_rate = "first byte at {arrivals_per_s:.0f} arrivals per second"
    rows += [(at_rate.format(**row), row["first_byte_ms"]) for row in file["curve"]]
    return [[name, *(f"{times[p]:.2f}" for p in ("p50", "p95", "p99"))] for name, times in rows]


def in_decode_steps() -> list[Table]:
    """Loads with prompts that decode steps do not read, and that they do."""
    files = results("simulated-load-between"), results("simulated-load")
    pairs = lambda name: zip(*(file[name] for file in files), strict=True)
    both = lambda key, pair, digits=1: [f"{row[key]:.{digits}f}" for row in pair]
    arriving = [
        [
            str(off["decoding"]),
            f"{off['gap_ms_p50']:.1f}",
            *both("gap_ms_p99", (off, on)),
            *both("gap_p99_over_p50", (off, on), 2),
            *both("first_token_ms_p50", (off, on)),
        ]
        for off, on in pairs("while_prompts_arrive")
    ]
    keys = ("gap_ms_p99", 1), ("per_token_ms_p50", 2)
    keys += ("first_token_ms_p50", 1), ("first_token_ms_p99", 1)
    rates = [
        [f"{pair[0]['arrivals_per_s']:.0f}", *(x for key, n in keys for x in both(key, pair, n))]
        for pair in pairs("at_rate")
    ]
    keys = ("tokens_per_s", 0), ("gap_ms_p99", 1), ("first_token_ms_p50", 1)
    half = [
        [str(pair[0]["slots"]), *(x for key, n in keys for x in both(key, pair, n))]
        for pair in pairs("half_full")
    ]
    unsteady = [
        [
            str(row["decoding"]),
            *(f"{row[key]:.1f}" for key in ("gap_ms_p50", "gap_ms_p99")),
            f"{row['gap_p99_over_p50']:.2f}",
        ]
        for row in results("simulated-load-unsteady")["while_prompts_arrive"]
    ]
    return [arriving, rates, half, unsteady]


def share_of_ideal(row: dict[str, Any]) -> str:
    least, most = min(row["share_of_each_draw"]), max(row["share_of_each_draw"])
    return f"{100 * row['share']:.1f} ({100 * least:.1f} to {100 * most:.1f})"


def drafter_kinds() -> list[Table]:
    rows = results("drafter-kinds-cpu")["runs"]
    longer = results("drafter-kinds-longer-trained-cpu")
    return [
        trained_kinds(results("drafter-kinds-trained-cpu")["runs"]),
        [
            [run["kind"], str(longer["settings"]["steps"]), f"{run['acceptance_length']:.3f}"]
            for run in longer["runs"]
        ],
        steps_of_kinds(),
        [
            [row["kind"], str(row["seed"]), f"{row['acceptance_length']:.3f}"]
            for row in rows
            if (row["kind"], row["seed"]) not in (("dflash", 1), ("dflash", 2))
        ],
        [heads_row(row) for row in results("drafter-heads-overfit-cpu")["rows"]],
    ]


def steps_of_kinds() -> Table:
    """Of every kind and width the milliseconds of an iteration."""
    kinds = ("dflash", 16), ("dflash2", 16), ("dflash", 8), ("dspark", 8), ("eagle3", 4)
    rows = []
    for kind, width in kinds:
        of_kind = results(f"steps-8b-{kind}-b{width}-h100")["rows"]
        times = {row["concurrency"]: row[f"{kind}_engine_ms"] for row in of_kind}
        rows.append([kind, str(width), *(f"{times[slots]:.2f}" for slots in (1, 8, 32))])
    return rows


def trained_kinds(runs: list[dict[str, Any]]) -> Table:
    """Of every kind its parameters, the length of every seed and their mean."""
    rows = []
    for kind in "dflash", "dspark", "dflash2":
        of_kind = [run for run in runs if run["kind"] == kind]
        lengths = [run["acceptance_length"] for run in of_kind]
        shown = [f"{length:.3f}" for length in (*lengths, sum(lengths) / len(lengths))]
        rows.append([kind, f"{of_kind[0]['parameters'] / 1e6:.2f}M", *shown])
    return rows


def test_dspark_and_dflash2_are_above_dflash_with_every_seed():
    """As the notes say of drafters that were trained alike."""
    runs = results("drafter-kinds-trained-cpu")["runs"]
    lengths = {(run["kind"], run["seed"]): run["acceptance_length"] for run in runs}
    for seed in range(3):
        for kind in "dspark", "dflash2":
            assert lengths[kind, seed] > lengths["dflash", seed]


def heads_row(row: dict[str, Any]) -> list[str]:
    rate = (
        "" if row["learning_rate"] is None else f"{row['learning_rate']:.0e}".replace("e-0", "e-")
    )
    trained = [str(row["texts"]), str(row["steps"]), rate, str(row["seed"])]
    return [row["kind"], *trained, *(f"{row[of]:.3f}" for of in ("held_out", "learned_from"))]


def host() -> Table:
    file = results("host-cpu")
    of_emit = {(row["tokens_out"], row["per_step"], row["stops"]): row for row in file["emit"]}
    of_step = {(row["requests"], row["tokens_out"]): row for row in file["step"]}
    return [
        ["`emit`, us per token: nothing out yet", f"{of_emit[0, 4, 0]['us']:.1f}"],
        ["8,000 tokens out", f"{of_emit[8000, 4, 0]['us']:.1f}"],
        ["8,000 tokens out, one token per step", f"{of_emit[8000, 1, 0]['us']:.1f}"],
        ["nothing out yet, two stop strings", f"{of_emit[0, 4, 2]['us']:.1f}"],
        ["a whole decode step, us: 1 request, nothing out yet", f"{of_step[1, 0]['us']:.0f}"],
        ["32 requests, nothing out yet", f"{of_step[32, 0]['us']:.0f}"],
        ["32 requests, 8,000 tokens out", f"{of_step[32, 8000]['us']:.0f}"],
    ]


def h200() -> list[Table]:
    row = lambda name, file, key: [
        name,
        *(f"{one[key]:.2f}" for one in results(f"steps-{file}-h200")["rows"]),
    ]
    iteration, plain = "dflash_engine_ms", "plain_engine_ms"
    steps_of_8b = [
        row("iteration, block of 16", "8b-dflash-b16", iteration),
        row("iteration, block of 8", "8b-dflash-b8", iteration),
        row("plain decoding", "8b-dflash-b16", plain),
    ]
    recurrence = [
        [
            f"{one['op']}, {one['case']}",
            f"{one['mosaic_us']:.1f}",
            f"{one['xla_us']:.0f}",
            f"{one['floor_us']:.1f}",
        ]
        for op in ("delta-read", "delta-fold")
        for one in results(f"{op}-h200")["rows"]
    ]
    iterations = [
        row("Qwen3-8B in 16 bits", "qwen3-8b", iteration),
        row("Qwen3-8B in 8 bits", BOTH_8B, iteration),
        row("Qwen3-4B in 8 bits", BOTH_4B, iteration),
    ]
    kinds = {
        " in 16 bits": "",
        ", weights in 8 bits": "-fp8-drafter",
        ", activations too": "-fp8-activations-drafter",
    }
    larger = [
        row(f"{before}Qwen3-{size}{kind}", f"qwen3-{size.lower()}{file}", key)
        for before, key in (("", iteration), ("plain decoding, ", plain))
        for size in ("14B", "32B")
        for kind, file in kinds.items()
        if key == iteration or file != "-fp8-drafter"
    ]
    portable = [portable_steps(), portable_ops(), splits()]
    return [iterations, larger, log_probabilities_in_8_bits(), steps_of_8b, recurrence, *portable]


def log_probabilities_in_8_bits() -> Table:
    """How far they are from float32."""
    cell = lambda distance: f"{distance['mean']:.4f}, {distance['largest']:.4f}"
    return [
        [row["computed_by"], cell(row["weights_in_8_bits"]), cell(row["activations_too"])]
        for row in results("fp8-log-probabilities-h200")["rows"]
    ]


def portable_steps() -> Table:
    """Iterations with a room for this many positions, on portable kernels and on XLA."""
    files = (
        ("portable kernels, 1024", "portable-1024"),
        ("portable kernels, 4096", "portable-4096"),
        ("XLA, 1024", "xla-1024"),
        ("XLA, 4096", "xla-4096"),
    )
    rows = {name: results(f"steps-8b-{file}-h200")["rows"] for name, file in files}
    return [
        [name, *(f"{one['dflash_engine_ms']:.2f}" for one in of_file)]
        for name, of_file in rows.items()
    ]


def portable_ops() -> Table:
    """Attention of 16 tokens with heads of 128, writing with heads of 128, and norms."""
    rows = [*results("portable-h200")["rows"], *results("add-norm-h200")["rows"]]
    shown = [
        one
        for one in rows
        if "portable_us" in one
        and "x 256" not in one["case"]
        and (one["op"] != "paged_attention" or "q16 causal" in one["case"])
    ]
    kinds = "portable", "xla", "mosaic", "floor"
    return [
        [f"{one['op']}, {one['case']}", *(f"{one[f'{kind}_us']:.1f}" for kind in kinds)]
        for one in shown
    ]


def splits() -> Table:
    """Portable attention with every number of splits. The chosen number is fastest."""
    by_case: dict[str, dict[int, float]] = {}
    for one in results("portable-splits-h200")["rows"]:
        by_case.setdefault(one["case"], {})[one["splits"]] = one["portable_us"]
    for case, times in by_case.items():
        slots, context = map(int, case.split(" ")[0].split("x"))
        shape = Shape(slots, 8, 16, 4, 128, page_size=64, max_pages=context // 64)
        assert min(times, key=lambda number: times[number]) == portable.choose_splits(shape)
    return [[case, *(f"{us:.1f}" for us in times.values())] for case, times in by_case.items()]


def h100() -> list[Table]:
    """FP8, its products, Qwen3.5."""
    named = {
        "8B-FP8": "qwen3-8b-fp8",
        "8B-FP8, activations in 8 bits": "qwen3-8b-fp8-activations",
        "8B-FP8, drafter in 8 bits": "qwen3-8b-fp8-drafter",
        "8B-FP8, activations and drafter in 8 bits": BOTH_8B,
        "4B-FP8": "qwen3-4b-fp8",
        "4B-FP8, activations in 8 bits": "qwen3-4b-fp8-activations",
        "4B-FP8, drafter in 8 bits": "qwen3-4b-fp8-drafter",
        "4B-FP8, activations and drafter in 8 bits": BOTH_4B,
    }
    nine = steps_of_a_file("Qwen3.5-9B", "qwen3.5-9b")
    programs = [programs_of_a_file(name) for name in ("Qwen3.5-4B", "Qwen3.5-9B")]
    newer = {"8B-FP8": ["qwen3-8b-fp8-plain"]}
    return [
        [
            row
            for name, file in named.items()
            for row in steps_of_a_file(name, file, *newer.get(name, ()))
        ],
        products_in_8_bits(),
        [*steps_of_a_file("Qwen3.5-4B", "qwen3.5-4b"), *nine, *programs],
        gated_products(),
        least_times(),
        order_of_copies(),
        under_load(),
        beside_the_vendor(),
    ]


def wanted_times() -> list[Table]:
    """Each row's name, its file, and the times that were wanted with 1, 4, 8, 16 and 32 slots."""
    rows = (
        ("8B-FP8, activations in 16 bits", "qwen3-8b-fp8-drafter", "4.8 5.2 5.8 7.6 13.4"),
        ("8B-FP8, activations in 8 bits", BOTH_8B, "4.8 5.2 5.7 6.8 10.2"),
        ("4B-FP8, activations in 16 bits", "qwen3-4b-fp8-drafter", "3.0 3.3 3.9 5.1 8.6"),
        ("4B-FP8, activations in 8 bits", BOTH_4B, "3.0 3.3 3.8 4.5 7.0"),
        ("8B in 16 bits", "8b", "6.7 7.3 8.0 9.6 15.4"),
        ("4B in 16 bits", "4b", "4.0 4.5 5.2 6.4 10.3"),
    )
    table = [[name, *reached(file, "dflash", wanted.split())] for name, file, wanted in rows]
    plain = reached("qwen3-8b-fp8-plain", "plain", ["3.3", "", "3.6", "", "4.8"])
    return [[*table, ["8B-FP8, plain", *plain]]]


def reached(file: str, method: str, wanted: list[str]) -> list[str]:
    rows = {row["concurrency"]: row for row in results(f"steps-{file}-h100")["rows"]}
    cell = lambda slots, time: f"{rows[slots][f'{method}_engine_ms']:.2f} / {time}" if time else ""
    return [cell(slots, time) for slots, time in zip(SLOTS, wanted, strict=True)]


def order_of_copies() -> Table:
    """Attention with 576 positions: before and after on one machine, then on another."""
    file, table = results("attention-order-h100"), []
    wanted = {"positions": 576, "width": 16, "stages": 2}
    of = lambda rows, slots: next(
        row for row in rows if row.items() >= (wanted | {"slots": slots}).items()
    )
    for slots in SLOTS:
        first, again = of(file["first"], slots), of(file["again"], slots)
        queries, everything = "queries first", "and no wait for the result"
        times = first["before"], first[queries], again[queries], again[everything]
        table.append([f"{slots}", *(f"{time:.2f}" for time in times)])
    return table


def beside_the_vendor() -> Table:
    """Steps with activations and drafter in 8 bits whose layers are single products, and how long
    they would take if all of these products took as long as cuBLAS's."""
    parts = results("parts-fp8-activations-drafter-by-slots-h100")["steps"]
    table = []
    of_vendor = {
        (row["model"], row["rows"]): row["layer"]
        for row in results("vendor-products-h100")["rows"]
        if row["kind"] == "fp8_tensor"
    }
    wanted_of = {"8b": {16: 6.8, 32: 10.2}, "4b": {8: 3.8, 16: 4.5, 32: 7.0}}
    for (model, wanted), file in zip(wanted_of.items(), (BOTH_8B, BOTH_4B), strict=True):
        name, rows = f"qwen3-{model}-fp8", results(f"steps-{file}-h100")["rows"]
        steps = {row["concurrency"]: row["dflash_engine_ms"] for row in rows}
        for slots in wanted:
            [us] = [row["us"] for row in parts if (row["model"], row["slots"]) == (name, slots)]
            products = (us["fp8_product"] + us.get("gated_product", 0)) / 1000
            theirs = 41 * of_vendor[model, 16 * slots] / 1000
            times = steps[slots], products, theirs, steps[slots] - products + theirs, wanted[slots]
            table.append([f"{model.upper()}, {slots}", *(f"{time:.2f}" for time in times)])
    return table


def under_load() -> Table:
    """The first quarter of a second, and the mean of those after the first second."""
    table = []
    for load in results("clock-under-load-h100")["loads"]:
        first, *others = load["windows"]
        later = [window for window in others if window["from_s"] >= 1]
        mean = lambda key: statistics.mean(window[key] for window in later)  # noqa: B023
        for when, value in (("first", first.__getitem__), ("after a second", mean)):
            keys = "ms", "tflop_s", "clock_mhz", "power_w"
            ms, *others = (value(key) for key in keys)
            table.append(
                [f"{load['products']}, {when}", f"{ms:.2f}", *(f"{x:.0f}" for x in others)]
            )
    return table


def gated_products() -> Table:
    return [
        [
            f"{row['model']}, {row['tokens']}",
            f"{row['in_one_us']:.1f}",
            f"{row['one_by_one_us']:.1f}",
        ]
        for row in results("gated-product-h100")["rows"]
    ]


def least_times() -> Table:
    return [
        [row["part"], f"{row['ms']:.2f}", f"{row['least_ms']:.2f}", row["by"]]
        for row in results("parts-qwen3-8b-fp8-activations-h100")["least"]
    ]


def hybrid() -> list[Table]:
    """Parts of a step of Qwen3.5-4B, some of which are sums of scopes."""
    scopes = {
        (row["phase"], row["part"]): row for row in results("profile-qwen3.5-4b-h100")["scopes"]
    }
    parts = [
        ("draft", "all", "draft", [""]),
        ("verify", "gate and up, with norm and SiLU", "verify", ["gate_up"]),
        ("", "reading blocks (`mixer_read`, gated norm)", "verify", ["delta"]),
        ("", "the recurrent layers' projections, with norms", "verify", ["delta_inputs"]),
        ("", "down", "verify", ["down"]),
        ("", "head", "verify", ["head"]),
        ("", "the recurrent layers' outputs", "verify", ["delta_out"]),
        (
            "",
            "attention layers",
            "verify",
            ["qkv", "attention", "attention_out", "qkv_write"],
        ),
        ("commit", "folding (`mixer_fold`, tails)", "commit", ["delta_fold"]),
        ("", "the drafter's context", "commit", ["context"]),
    ]
    total = lambda phase, names, key: sum(scopes[phase, name][key] for name in names)
    return [
        [
            [
                shown,
                kernels,
                f"{total(phase, names, 'ms_per_step'):.2f}",
                f"{total(phase, names, 'kernels_per_step'):.0f}",
            ]
            for shown, kernels, phase, names in parts
        ]
    ]


def steps_of_a_file(name: str, *files: str) -> Table:
    """If several files have the same figure, that of the last of them counts."""
    by_slots: dict[int, dict[str, Any]] = {}
    for file in files:
        for row in results(f"steps-{file}-h100")["rows"]:
            by_slots.setdefault(row["concurrency"], {}).update(row)
    slots = (1, 8, 32) if name.startswith("Qwen3.5") else SLOTS
    return [
        [
            f"{name}, {what}",
            *(f"{by_slots[n][key]:.2f}" if n in by_slots else "" for n in slots),
        ]
        for what, key in (("iteration", "dflash_engine_ms"), ("plain", "plain_engine_ms"))
        if any(key in row for row in by_slots.values())
    ]


def programs_of_a_file(name: str) -> list[str]:
    rows = {row["concurrency"]: row for row in results(f"steps-{name.lower()}-h100")["rows"]}
    times = [f"{rows[slots]['dflash_device_ms']:.2f}" for slots in (1, 8, 32)]
    return [f"{name}, program of an iteration", *times]


def products_in_8_bits() -> Table:
    """The fastest split of each matrix of 8B."""
    rounded = results("fp8-splits-rounded-h100")["rows"]
    rows = [row for row in results("fp8-splits-h100")["rows"] if "8 bits" not in row["case"]]
    tokens = ["128 tokens", "256 tokens", "512 tokens"]
    tokens += [f"{count} in 8 bits" for count in tokens]
    fastest = lambda matrix, which: min(
        (row for row in (*rows, *rounded) if row["case"] == f"Qwen3-8B {matrix}, {which}"),
        key=lambda row: row["us"],
    )
    return [
        [matrix, *(told(fastest(matrix, which)) for which in tokens)]
        for matrix in ("out", "gate_up", "down", "qkv")
    ]


def told(row: dict[str, Any]) -> str:
    outputs, parts = row["split"]
    return f"{row['us']:.1f} ({outputs} x {parts})"


WITH_ROW_TILES = (
    ("Qwen3-32B", 8, 8, 128, 16),
    ("a quarter of 32B", 2, 8, 128, 16),
    ("Qwen3-14B", 8, 5, 128, 16),
    ("Qwen3.5 with 24 heads", 4, 6, 256, 16),
    ("Qwen3-8B, 128 tokens", 8, 4, 128, 128),
    ("a quarter of 32B, 512 tokens", 2, 8, 128, 512),
)
"""Key-value heads, query heads of each, their size, and the tokens of a request, in the order of
the runs of the results file."""


def row_tiles() -> Table:
    """Attention without splits and with two warpgroups, which was chosen before, and as it is."""
    runs = results("attention-in-row-tiles-h200")["runs"]
    return [
        cells
        for model, run in zip(WITH_ROW_TILES, runs, strict=True)
        for requests in (1, 8, 32)
        if (cells := row_of_tiles(model, requests, run["rows"]))
    ]


def row_of_tiles(model: tuple, requests: int, rows: list[dict[str, Any]]) -> list[str]:
    name, kv_heads, group, head_dim, width = model
    shape = Shape(requests, kv_heads, width, group, head_dim, page_size=64, max_pages=64)
    chosen = choose_sizes(shape)
    us = {
        (row["case"].split()[0], row["splits"], row["warpgroups"]): row["mosaic_us"] for row in rows
    }
    cells = []
    for context in (1024, 4096):
        case = f"{requests}x{context}"
        if (case, 1, 2) not in us:
            return []
        now = us[case, chosen.splits, chosen.warpgroups]
        cells += [f"{us[case, 1, 2]:.1f}", f"{now:.1f}"]
    return [f"{name}, {requests}", f"{chosen.splits} and {chosen.warpgroups}", *cells]


def test_attention_over_several_tiles_of_rows_is_that_of_the_results_file():
    assert tables("h200")[-1] == row_tiles()


def exchange_over_four() -> Table:
    before, now = results("exchange-one-shot-h200x4"), results("exchange-h200x4")
    us = lambda file, rows, name: next(
        f"{row['us_per_call']['median']:.1f}"
        for row in file["rows"]
        if (row["rows"], row["implementation"]) == (rows, name)
    )
    columns = (before, "mosaic"), (now, "mosaic"), (now, "psum")
    return [
        [str(rows), *(us(file, rows, name) for file, name in columns)]
        for rows in (64, 128, 256, 512)
    ]


def steps_over_several() -> Table:
    files = [results(name)["rows"] for name in ("tp2-8b-h200", "tp2-32b-h200", "tp4-32b-h200")]
    ours = [[f"{row['step_ms']['p50']:.2f}" for row in rows] for rows in files]
    theirs = "13.2", "15.6", "37.6"
    return [
        [requests, small, large, peer, over_four]
        for requests, small, large, peer, over_four in zip(
            ("1", "8", "32"), *ours[:2], theirs, ours[2]
        )
    ]


def test_what_several_gpus_take_is_that_of_the_results_files():
    found = tables("parallel")
    assert exchange_over_four() in found
    assert steps_over_several() in found


PAGES = {
    "h200": h200,
    "h100": h100,
    "load": load,
    "hybrid": hybrid,
    "dspark": candidates,
    "drafter-kinds": drafter_kinds,
    "bench-h100": bench,
    "step-times": steps,
    "adaptive-widths": spans,
    "verify-budget": verify_budget,
    "prompt-lookup": prompt_lookup,
    "kernels": kernels,
    "start": start,
    "wanted-times": wanted_times,
}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_results_files(page):
    expected = PAGES[page]()
    found = tables(page)
    assert len(found) >= len(expected)
    for shown, right in zip(found, expected, strict=False):
        assert shown == right


def test_steps_with_both_forms_are_those_of_the_results_file():
    assert tables("verify-budget")[-1] == even_steps()


def test_the_host_s_work_is_that_of_the_results_file():
    assert tables("step-times")[-1] == host()
