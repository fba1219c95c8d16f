"""Seconds from the start of a process to its first token, without those for making the weights.

    python scripts/bench_start.py --model qwen3-8b --json start.json

Every start is a process of its own. Weights are random and made on the device instead of being
read; the seconds for that are reported but not counted. Cases:

    one slot, nothing cached          first token of a 64-token prompt, max_batch=1
    one slot, second start            the same again
    one slot, a changed line          the same after one line of one layer was edited
    8 slots, nothing cached           16 tokens of one request, max_batch=8
    8 slots, second start             the same again
"""

import argparse
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = {
    "one": ("one slot, nothing cached", 1),
    "one-again": ("one slot, second start", 1),
    "one-edited": ("one slot, a changed line", 1),
    "eight": ("8 slots, nothing cached", 8),
    "eight-again": ("8 slots, second start", 8),
}
EDITED_FILE = "jaxspec/layers/chained.py"
EDITED_LINE = "        after.append(chain.own(x))\n"
EDIT = "        x = x * 0.999 if i == 3 else x\n"
"""A line that a researcher might add to one layer, before EDITED_LINE."""
PROMPT_TOKENS = 64


def main() -> None:
    options = parse()
    if options.slots:
        print(json.dumps(start(options)), flush=True)
        return
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "starts": []}
    caches: dict[int, str] = {}
    for name in options.cases:
        title, slots = CASES[name]
        cache = caches.setdefault(slots, tempfile.mkdtemp(prefix="jaxspec-start-"))
        found = run_one(options, slots, cache, edited=name == "one-edited")
        report["environment"] = found.pop("environment")
        report["starts"].append({"case": title, **found})
        print(title, json.dumps(found), flush=True)
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    for cache in caches.values():
        shutil.rmtree(cache, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_one(options: argparse.Namespace, slots: int, cache: str, edited: bool) -> dict[str, Any]:
    """Starts a process and returns what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        root = edited_copy(pathlib.Path(folder)) if edited else ROOT
        command = [sys.executable, str(root / "scripts/bench_start.py"), "--slots", str(slots)]
        command += ["--model", options.model, "--dtype", options.dtype]
        environment = os.environ | {
            "PYTHONPATH": str(root),
            "JAXSPEC_CACHE_DIR": cache,
            "JAXSPEC_STARTED_AT": str(time.time()),
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def edited_copy(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the package with one line of one layer edited."""
    for name in ("jaxspec", "pallas_kernels", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / EDITED_FILE
    text = path.read_text()
    assert text.count(EDITED_LINE) == 1, f"{EDITED_FILE} has no line {EDITED_LINE!r} any more"
    path.write_text(text.replace(EDITED_LINE, EDIT + EDITED_LINE))
    return folder


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Starts in this process, and returns the seconds of every phase."""
    phases = Phases(float(os.environ.get("JAXSPEC_STARTED_AT", time.time())))
    logging.basicConfig(format="%(relativeCreated)6d ms  %(message)s")
    logging.getLogger("jaxspec").setLevel(logging.INFO)
    import jax
    import jax.numpy as jnp

    from jaxspec.engine.engine import Engine
    from jaxspec.engine.requests.sampling_params import SamplingParams
    from jaxspec.measure.engines import random_pair
    from jaxspec.measure.environment import environment

    phases.end("imports")
    jax.local_devices()[0].memory_stats()
    phases.end("device")
    pair = random_pair(options.model, 16, jnp.dtype(options.dtype))
    phases.end("weights")
    engine = Engine.from_models(
        pair.models, pair.params, max_batch=options.slots, prefix_caching=False
    )
    phases.end("engine")
    prompt = list(range(100, 100 + PROMPT_TOKENS))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    compiled = engine.warm_up([prompt], params)
    phases.end("warm_up")
    events = engine.stream([prompt], params)
    next(iter(events))
    phases.end("first_token")
    for _ in events:
        pass
    phases.end("rest")
    seconds = phases.seconds
    to_first = sum(seconds[name] for name in PHASES_TO_FIRST_TOKEN)
    return {
        "first_token_s": round(to_first, 2),
        "answered_s": round(to_first + seconds["rest"], 2),
        "programs": compiled,
        "phases_s": {name: round(value, 2) for name, value in seconds.items()},
        "environment": environment(),
    }


PHASES_TO_FIRST_TOKEN = ("imports", "device", "engine", "warm_up", "first_token")
"""All phases but the weights'."""


class Phases:
    """Seconds of consecutive phases."""

    def __init__(self, began: float):
        self.last = began
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        now = time.time()
        self.seconds[name], self.last = now - self.last, now


if __name__ == "__main__":
    main()
