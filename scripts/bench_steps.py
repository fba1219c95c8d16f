"""Time of plain, draft, verify and whole speculative steps, alone and through the engine's loop.

    python scripts/bench_steps.py --model qwen3-8b --draft dflash-b16 --json steps.json

Random weights: a step's time does not depend on them. Acceptance is set by hand, because random
drafts are never right: every step keeps `--accepted` drafts, which changes no step's time either.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec.engine.schedule.drivers import DRIVERS
from jaxspec.engine.step.propose import draft_step
from jaxspec.engine.step.target import commit_step, verify_step
from measuring import milliseconds_per_call, write_json

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.step.io import Models, PromptChunk
from jaxspec.engine.step.upload import filled
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.environment import environment
from jaxspec.measure.peers import read_peers
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import NAMES, dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3

BANDWIDTH = 2.95e12
"""Bytes per second of a large copy on one H100, read plus written."""
FLOPS = 798e12
"""bf16 FLOP/s of a large matrix product on one H100."""


def main() -> None:
    options = parse()
    peers = read_peers(options.anchors, options.model) if options.anchors else []
    models, params = build(options)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(),
        "model": options.model,
        "block_size": options.block_size,
        "prompt_tokens": options.prompt,
        "accepted_per_step": options.accepted,
        "rows": [],
    }
    if options.prefill:
        result["prefill"] = prefill(options, models, params)
        write_json(options.json, result)
        print(json.dumps(result["prefill"]), flush=True)
    builders = {
        "plain": lambda: build_engine(
            options, Models(models.target, None), {"target": params["target"]}
        ),
        "dflash": lambda: build_engine(options, models, params),
    }
    engines = {method: builders[method]() for method in options.methods}
    for concurrency in options.concurrency:
        row = measure(engines, concurrency, options)
        for peer in peers:
            if peer["concurrency"] == concurrency:
                row[f"{peer['system']} {peer['mode']}"] = peer["step_ms"]
        result["rows"].append(row)
        write_json(options.json, result)  # what a time limit leaves is still written
    print(table(result["rows"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", choices=(*NAMES, "tiny"))
    parser.add_argument(
        "--draft",
        dest="block_size",
        type=block_size,
        default="dflash-b16",
        metavar="dflash-bN",
        help="a block of N tokens",
    )
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


def build(options: argparse.Namespace) -> tuple[Models, dict[str, Any]]:
    name = "qwen3-0.6b" if options.model == "tiny" else options.model
    config = qwen3(name)
    if options.model == "tiny":
        config = shrunk(config)
    draft = dflash_for(config, options.block_size, num_layers=5 if options.model != "tiny" else 1)
    models = Models(
        Qwen3(config, draft.target_layer_ids, jnp.bfloat16), DFlash(draft, jnp.bfloat16)
    )
    params = {
        "target": random_params(models.target, jax.random.key(0)),
        "drafter": random_params(models.drafter, jax.random.key(1)),
    }
    return models, jax.block_until_ready(params)


def shrunk(config):
    """Small enough to try this script on a CPU."""
    decoder = replace(
        config.decoder, num_layers=5, hidden_size=64, intermediate_size=128, num_heads=4,
        num_kv_heads=2, head_dim=64,
    )  # fmt: skip
    return replace(config, decoder=decoder)


def build_engine(options: argparse.Namespace, models: Models, params: dict[str, Any]) -> Engine:
    most = max(options.concurrency)
    pages = most * (-(-(options.max_model_len + options.block_size) // options.page_size))
    return Engine.from_models(
        models,
        params,
        max_batch=most,
        max_model_len=options.max_model_len,
        page_size=options.page_size,
        num_pages=pages,
        driver="overlapped",
    )


def forced_step(models, params, state, slots, accepted):
    """A whole speculative step that keeps so many drafts, right or wrong."""
    state, drafts = draft_step(models, params, state, slots)
    num_drafts = jnp.full_like(slots, drafts.shape[1])
    state, verified = verify_step(models, params, state, slots, drafts, num_drafts, draws=False)
    return commit_step(models, params, state, slots, verified, accepted)


CLOCK = CompileClock()
FORCED = jax.jit(forced_step, static_argnums=0, donate_argnums=2)


def measure(
    engines: dict[str, Engine], concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All figures at one concurrency; plain decoding by an engine that has no drafter."""
    row: dict[str, Any] = {"concurrency": concurrency}
    begin, compiled = time.perf_counter(), CLOCK.seconds
    for method, engine in engines.items():
        row[f"{method}_device_ms"] = device_time(engine, concurrency, options, method)
        times = run_engine(engine, concurrency, options, method)
        row[f"{method}_engine_ms"] = statistics.median(times)
        row[f"{method}_steps"] = len(times)
    if concurrency in options.apart:
        for part in ("draft", "verify"):
            row[f"{part}_device_ms"] = device_time(engines["dflash"], concurrency, options, part)
        times = run_engine(engines["dflash"], concurrency, options, "lockstep")
        row["dflash_lockstep_ms"] = statistics.median(times)
    row["compile_s"] = CLOCK.seconds - compiled
    row["measured_in_s"] = time.perf_counter() - begin
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def run_engine(
    engine: Engine, concurrency: int, options: argparse.Namespace, method: str
) -> list[float]:
    """Milliseconds per step of the engine's loop while all slots decode."""
    loop = engine.loop
    loop.driver = driver_of(method, options.accepted)
    loop.plan = plan_of(loop, method)
    random = np.random.default_rng(0)
    vocabulary = loop.device.models.target.config.vocab_size
    prompts = random.integers(0, vocabulary, (concurrency, options.prompt)).tolist()
    budget = options.max_model_len - options.prompt
    stream = engine.stream(prompts, SamplingParams(max_tokens=budget, ignore_eos=True))
    next(stream)
    while loop.waiting or any(not request.token_ids for request in loop.running.values()):
        loop.step()
    for _ in range(5):
        loop.step()
    times = []
    while len(times) < options.steps and len(loop.running) == concurrency:
        begin = time.perf_counter()
        loop.step()
        times.append((time.perf_counter() - begin) * 1e3)
    stream.close()
    loop.land_all()
    return times


def driver_of(method: str, accepted: int):
    if method == "plain":
        return DRIVERS["overlapped"]
    return (forced_lockstep if method == "lockstep" else forced_driver)(accepted)


def plan_of(loop: Loop, method: str) -> Plan:
    name = "none" if method == "plain" else "dflash"
    return replace(loop.plan, method=name, width=1 if method == "plain" else loop.plan.block_size)


def forced_driver(accepted: int):
    """The overlapped driver with acceptance set by hand."""

    def drive(loop: Loop) -> None:
        loop.admit()
        before = len(loop.flights)
        loop.read_prompts()
        if requests := loop.decoding():
            slots, device = loop.slots(requests), loop.device
            keep = filled((slots.size,), accepted)
            device.state, result = FORCED(device.models, device.params, device.state, slots, keep)
            loop.fly(requests, result)
        loop.land_all(but=len(loop.flights) - before)

    return drive


def forced_lockstep(accepted: int):
    """The lockstep driver with acceptance set by hand, after the host has seen the tokens."""

    def drive(loop: Loop) -> None:
        loop.admit()
        loop.read_prompts()
        loop.land_all()
        if requests := loop.decoding():
            slots, device = loop.slots(requests), loop.device
            drafts = device.run("draft_step", slots)
            num_drafts = filled((slots.size,), drafts.shape[1])
            verified = device.run("verify_step", slots, drafts, num_drafts, draws=False)
            np.asarray(drafts), np.asarray(verified.tokens)
            keep = filled((slots.size,), accepted)
            loop.fly(requests, device.run("commit_step", slots, verified, keep))
            loop.land_all()

    return drive


def device_time(engine: Engine, concurrency: int, options: argparse.Namespace, step: str) -> float:
    """Milliseconds of one program, called in a row without reading anything back."""
    device = engine.loop.device
    slots = filled_slots(concurrency)
    keep = filled((concurrency,), 0)
    drafts = filled((concurrency, options.block_size - 1), 7)
    num_drafts = filled((concurrency,), options.block_size - 1)

    def forced():
        device.state, result = FORCED(device.models, device.params, device.state, slots, keep)
        return result

    calls = {
        "plain": lambda: device.run("plain_step", slots, draws=False),
        "draft": lambda: device.run("draft_step", slots),
        "verify": lambda: device.run("verify_step", slots, drafts, num_drafts, draws=False),
        "dflash": forced,
    }
    for _ in range(3):
        jax.block_until_ready(calls[step]())
    seat_everybody(engine, concurrency, options)
    milliseconds = milliseconds_per_call(calls[step], options.steps // 5 or 1)["median"]
    if options.trace:
        with jax.profiler.trace(f"{options.trace}/{options.model}-{step}-{concurrency}"):
            jax.block_until_ready([calls[step]() for _ in range(3)])
    return milliseconds


def prefill(
    options: argparse.Namespace, models: Models, params: dict[str, Any]
) -> dict[str, float]:
    """One chunk that is the whole prompt of every slot, read by the target alone."""
    slots, tokens = options.prefill
    sizes = replace_options(options, concurrency=[slots], prompt=0, max_model_len=tokens + 64)
    engine = build_engine(sizes, Models(models.target, None), {"target": params["target"]})
    seat_everybody(engine, slots, sizes)
    chunk = PromptChunk(
        slots=filled_slots(slots),
        tokens=jnp.full((slots, tokens), 7, jnp.int32),
        starts=filled((slots,), 0),
        counts=filled((slots,), tokens),
    )
    call = lambda: engine.loop.device.run("prefill_step", chunk, draws=False)
    jax.block_until_ready(call())
    milliseconds = milliseconds_per_call(call, 3)["median"]
    decoder = models.target.config.decoder
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params["target"]["layers_0"]))
    weights = 2 * matrices * decoder.num_layers * slots * tokens
    seen = tokens * (tokens + 1) // 2
    attention = 4 * decoder.num_heads * decoder.head_dim * decoder.num_layers * slots * seen
    return {
        "slots": slots,
        "tokens": tokens,
        "ms": milliseconds,
        "tflop_s": (weights + attention) / milliseconds / 1e9,
        "share_of_matrix_rate": (weights + attention) / milliseconds / 1e-3 / FLOPS,
    }


def replace_options(options: argparse.Namespace, **changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **changed})


def filled_slots(concurrency: int):
    return jnp.asarray(np.arange(concurrency, dtype=np.int32))


def seat_everybody(engine: Engine, concurrency: int, options: argparse.Namespace) -> None:
    """Slots in the middle of a generation: the prompt counted, pages held, budget left."""
    state, plan = engine.loop.device.state, engine.loop.plan
    table = np.zeros(state.page_table.shape, np.int32)
    table[:concurrency] = 1 + np.arange(concurrency * plan.max_pages).reshape(concurrency, -1)
    lengths = np.zeros(state.lengths.shape, np.int32)
    lengths[:concurrency] = options.prompt
    limits = np.zeros(state.limits.shape, np.int32)
    limits[:concurrency] = options.max_model_len - 1
    engine.loop.device.state = replace(
        state,
        page_table=jnp.asarray(table),
        lengths=jnp.asarray(lengths),
        limits=jnp.asarray(limits),
    )


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
