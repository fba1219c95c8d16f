"""Time of plain, draft, verify and whole speculative steps, alone and through the engine's loop.

    python scripts/bench_steps.py --model qwen3-8b --draft dflash-b16 --json steps.json

Weights are random, because a step's time does not depend on them. Random drafts are never right, so
acceptance is synthetic: in the engine's loop every step keeps `--accepted` drafts, which does not
change the time of a step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from measuring import about, milliseconds_per_call, write_json
from steady import occupied_device, random_prompts, step_until_all_decode

from jaxspec import cli
from jaxspec.acceptance.synthetic import from_rates
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import Kernels
from jaxspec.engine.plan.planning import WIDTH_WITHOUT_DRAFTER
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import PromptChunk
from jaxspec.engine.step.packed import packed_chunk
from jaxspec.engine.step.steps import decode_step, draft_step, prefill_step, verify_step
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.engines import random_pair, without_drafter
from jaxspec.measure.floor import step_bytes
from jaxspec.measure.peers import read_peers
from jaxspec.models.presets import published
from jaxspec.models.shapes import NAMES
from jaxspec.proposers.device import Drafts
from jaxspec.proposers.methods import DRAFTERS

FLOPS = 798e12
"""bf16 FLOP/s of a large matrix product on one H100."""
SETTLING = 5
"""Steps of the loop before the first timed one."""


def main() -> None:
    options = parse()
    peers = read_peers(options.anchors, options.model) if options.anchors else []
    pair = random_pair(
        options.model,
        options.block_size,
        jnp.bfloat16,
        kind=options.kind,
        draft_quantization=options.draft_quantization,
    )
    options.methods = [options.kind if one == "dflash" else one for one in options.methods]
    report = {
        **about(),
        "model": options.model,
        "kind": options.kind,
        "block_size": options.block_size,
        "draft_bytes": step_bytes(pair.models, pair.params).draft,
        "prompt_tokens": options.prompt,
        "accepted_per_step": options.accepted,
        "max_model_len": options.max_model_len,
        "kernels": options.kernels,
        "fp8_activations": options.fp8_activations,
        "draft_quantization": options.draft_quantization,
        "rows": [],
    }
    if options.prefill:
        report["prefill"] = prefill(options, pair)
        write_json(options.json, report)
        print(json.dumps(report["prefill"]), flush=True)
    measure_steps(options, pair, report, peers)
    print(table(report["rows"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=NAMES)
    parser.add_argument(
        "--draft",
        dest="block_size",
        type=block_size,
        default="dflash-b16",
        metavar="dflash-bN",
        help="a block of N tokens",
    )
    parser.add_argument("--kind", choices=DRAFTERS, default="dflash", help="kind of the drafter")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    methods = ["plain", "dflash"]
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods)
    parser.add_argument(
        "--apart", type=int, nargs="*", default=[], help="concurrencies with draft and verify apart"
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument(
        "--fp8-activations", action="store_true", help="round activations to 8 bits too"
    )
    parser.add_argument(
        "--draft-quantization",
        choices=("fp8",),
        help="keep the drafter's matrices, and its copy of the head, in 8 bits",
    )
    parser.add_argument("--anchors", help="JSON with the peers' step times to print beside ours")
    parser.add_argument(
        "--prefill",
        type=int,
        nargs=2,
        metavar=("SLOTS", "TOKENS"),
        help="time one prompt chunk too",
    )
    parser.add_argument("--trace", help="folder for a trace of three steps of every program")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def block_size(draft: str) -> int:
    return int(draft.removeprefix("dflash-b"))


def measure_steps(
    options: argparse.Namespace,
    pair: Opened,
    report: dict[str, Any],
    peers: list[dict[str, Any]],
) -> None:
    """Fills the report's rows, one per concurrency."""
    clock = CompileClock()
    engines = {method: build_engine(options, pair, method) for method in options.methods}
    if options.apart:
        engines["lockstep"] = build_engine(options, pair, "lockstep")
    for engine in engines.values():
        engine.warm_up()
    report["compile_s"] = clock.seconds
    for concurrency in options.concurrency:
        row = measure(engines, concurrency, options)
        for peer in peers:
            if peer["concurrency"] == concurrency:
                row[f"{peer['system']} {peer['mode']}"] = peer["step_ms"]
        report["rows"].append(row)
        write_json(options.json, report)  # so that a time limit leaves what was measured


def build_engine(options: argparse.Namespace, pair: Opened, method: str) -> Engine:
    """An engine for a method: plain, dflash, or lockstep, which is dflash with its parts as
    programs of their own."""
    most = max(options.concurrency)
    plain, lockstep = method == "plain", method == "lockstep"
    models = without_drafter(pair) if plain else pair
    longest = options.max_model_len + max(options.block_size, WIDTH_WITHOUT_DRAFTER)
    return Engine.from_models(
        models.models,
        models.params,
        max_batch=most,
        max_model_len=options.max_model_len,
        page_size=options.page_size,
        num_pages=most * -(-longest // options.page_size),
        batch_sizes=tuple(sorted(options.concurrency)),
        prefill_shapes=((min(4, most), options.prompt),),
        driver="lockstep" if lockstep else "overlapped",
        adaptive=False,  # every step verifies whole blocks
        prefix_caching=False,
        compile_ahead=False,
        kernels=options.kernels,
        fp8_activations=options.fp8_activations,
        synthetic_acceptance=None if plain or lockstep else keeps(options.accepted),
    )


def keeps(accepted: int) -> tuple[float, ...]:
    """Synthetic acceptance that keeps exactly this many drafts in every step."""
    return (1.0,) * accepted or (0.0,)


def measure(
    engines: dict[str, Engine], concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All figures at one concurrency. Plain decoding has an engine without a drafter."""
    row: dict[str, Any] = {"concurrency": concurrency}
    begin = time.perf_counter()
    for method in options.methods:
        row[f"{method}_device_ms"] = device_ms(engines[method], concurrency, options, "step")
        times = engine_ms(engines[method], concurrency, options)
        row[f"{method}_engine_ms"] = statistics.median(times)
        row[f"{method}_steps"] = len(times)
    if concurrency in options.apart:
        for part in ("draft", "verify"):
            row[f"{part}_device_ms"] = device_ms(engines["lockstep"], concurrency, options, part)
        times = engine_ms(engines["lockstep"], concurrency, options)
        row[f"{options.kind}_lockstep_ms"] = statistics.median(times)
    row["measured_in_s"] = time.perf_counter() - begin
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def engine_ms(engine: Engine, concurrency: int, options: argparse.Namespace) -> list[float]:
    """Milliseconds per step of the engine's loop while all slots decode."""
    budget = options.max_model_len - options.prompt
    params = SamplingParams(max_tokens=budget, ignore_eos=True)
    prompts = random_prompts(engine, concurrency, options.prompt)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    step_until_all_decode(engine, ids)
    for _ in range(SETTLING):
        engine.step(ids)
    times = []
    while len(times) < options.steps and engine.num_decoding == concurrency:
        begin = time.perf_counter()
        engine.step(ids)
        times.append((time.perf_counter() - begin) * 1e3)
    engine.abort(ids)
    return times


def device_ms(engine: Engine, concurrency: int, options: argparse.Namespace, part: str) -> float:
    """Milliseconds of one program, called in a row without reading anything back."""
    if engine.options.synthetic_acceptance:  # contexts grow least if no draft is kept
        rates = from_rates(keeps(0), options.block_size - 1)
        engine.set_synthetic_acceptance(rates)
    with occupied_device(engine, concurrency, options.prompt) as device:
        call = calls(engine, device, concurrency)[part]
        for _ in range(3):
            jax.block_until_ready(call())
        milliseconds = milliseconds_per_call(call, options.steps // 5 or 1)["median"]
        if options.trace:
            name = f"{options.model}-{engine.plan.method}-{part}-{concurrency}"
            with jax.profiler.trace(f"{options.trace}/{name}"):
                jax.block_until_ready([call() for _ in range(3)])
    if engine.options.synthetic_acceptance:
        engine.set_synthetic_acceptance(from_rates(keeps(options.accepted), options.block_size - 1))
    return milliseconds


def calls(engine: Engine, device: Device, concurrency: int) -> dict[str, Callable[[], Any]]:
    """A whole decode step and its two largest parts."""
    plan = engine.plan
    programs = plan.decode_programs(concurrency, plan.width, host_drafts=False, draws=False)
    how = {"drafting": programs.drafting}
    slots = jnp.arange(concurrency, dtype=jnp.int32)
    num_drafts = jnp.full(concurrency, plan.width - 1, jnp.int32)
    drafts = Drafts(jnp.full((concurrency, plan.width - 1), 7, jnp.int32), num_drafts)
    return {
        "step": lambda: device.run(decode_step, slots, num_drafts, **how, draws=False),
        "draft": lambda: device.run(draft_step, slots, num_drafts, **how),
        "verify": lambda: device.run(verify_step, slots, drafts, draws=False),
    }


def prefill(options: argparse.Namespace, pair: Opened) -> dict[str, float]:
    """Times one chunk that is the whole prompt of every slot, read by the target alone."""
    slots, tokens = options.prefill
    sizes = {"concurrency": [slots], "prompt": tokens, "max_model_len": tokens + 64}
    engine = build_engine(argparse.Namespace(**vars(options) | sizes), pair, "plain")
    chunk = PromptChunk(
        slots=jnp.arange(slots, dtype=jnp.int32),
        tokens=jnp.full((slots, tokens), 7, jnp.int32),
        starts=jnp.zeros(slots, jnp.int32),
        counts=jnp.full(slots, tokens, jnp.int32),
    )
    packed = packed_chunk(chunk)
    with occupied_device(engine, slots, context=0) as device:
        call = lambda: device.run(prefill_step, packed, draws=False)
        jax.block_until_ready(call())
        milliseconds = milliseconds_per_call(call, 3)["median"]
    of_layers = [part for name, part in pair.params["target"].items() if "layers_" in name]
    matrices = sum(leaf.size for leaf in jax.tree.leaves(of_layers))
    operations = prefill_operations(options.model, matrices, slots, tokens)
    per_second = operations / milliseconds * 1e3
    return {
        "slots": slots,
        "tokens": tokens,
        "ms": milliseconds,
        "tflop_s": per_second / 1e12,
        "share_of_matrix_rate": per_second / FLOPS,
    }


def prefill_operations(model: str, matrices: int, slots: int, tokens: int) -> int:
    """Operations of attention and of the layers' matrices, which have `matrices` numbers in all.
    The sums of recurrent layers are not counted."""
    config = published(model)
    decoder, kinds = config.decoder, getattr(config, "layer_kinds", None)
    attending = decoder.num_layers if kinds is None else kinds.count("attention")
    seen = tokens * (tokens + 1) // 2
    attention = 4 * decoder.num_heads * decoder.head_dim * seen
    return slots * (2 * matrices * tokens + attending * attention)


def table(rows: list[dict[str, Any]]) -> str:
    names = [name for name in rows[0] if name != "concurrency"]
    width = max(len(name) for name in names)
    head = f"{'ms':<{width}}" + "".join(f"{row['concurrency']:>9}" for row in rows)
    lines = [
        f"{name:<{width}}" + "".join(f"{row.get(name, float('nan')):>9.3f}" for row in rows)
        for name in names
    ]
    return "\n".join((head, *lines))


if __name__ == "__main__":
    sys.exit(cli.run(main))
