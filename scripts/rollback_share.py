"""How much of a step of a hybrid target goes into being able to drop drafts.

    python scripts/bench_steps.py --model qwen3.5-4b --concurrency 8 --methods dflash \
        --trace traces --json steps.json
    python scripts/rollback_share.py traces --model qwen3.5-4b --slots 8 --json rollback.json

Two things are counted: the kernels of the commit that fold a block into the states, which are timed
in the trace, and what verifying writes only for them, whose bytes are divided by the speed of a
large copy. A step is the sum of its kernels, so waiting between them does not make the share less.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from measuring import about, write_json

from jaxspec.layers.gated_delta import corrected_shapes
from jaxspec.models.config import Qwen35Config
from jaxspec.models.parameters import num_bytes
from jaxspec.models.presets import published
from jaxspec.trace.events import Event, device_events, read_planes

COPY = 2.95e12
"""Bytes per second of a large copy on an H100."""
FOLDS, READS = ("block_fold", "mixer_fold"), ("block_read", "mixer_read")
MOST = 0.06
STEPS = 3
"""Steps that `bench_steps.py` records."""


def main() -> None:
    options = parse()
    report = about() | share_of(options)
    write_json(options.json, report)
    print(json.dumps(report, indent=1))
    sys.exit(report["share"] > options.most)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", type=Path, help="folder that bench_steps.py --trace wrote")
    parser.add_argument("--model", default="qwen3.5-4b", help="a hybrid model (%(default)s)")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--width", type=int, default=16, help="tokens of a block")
    parser.add_argument("--most", type=float, default=MOST, help="fails if the share is larger")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def share_of(options: argparse.Namespace) -> dict[str, Any]:
    folder = options.traces / f"{options.model}-dflash-step-{options.slots}"
    events = list(device_events(read_planes(folder)))
    step_ms, fold_ms, read_ms = (time_of(events, names) for names in (("",), FOLDS, READS))
    written = bytes_for_commit(options.model, options.slots, options.width)
    write_ms = written / COPY * 1e3
    return {
        "model": options.model,
        "slots": options.slots,
        "width": options.width,
        "step_ms": step_ms,
        "read_ms": read_ms,
        "fold_ms": fold_ms,
        "bytes_written_for_the_fold": written,
        "writing_them_ms": write_ms,
        "share": (fold_ms + write_ms) / step_ms,
    }


def time_of(events: Sequence[Event], names: tuple[str, ...]) -> float:
    """Milliseconds per step of the kernels whose names begin so."""
    counted = (event for event in events if event.name.startswith(names))
    return sum(event.duration_ns for event in counted) / STEPS / 1e6


def bytes_for_commit(model: str, slots: int, width: int) -> int:
    """What reading a block in matrix products writes for its commit. The projection is written in
    any case."""
    config = published(model)
    if not isinstance(config, Qwen35Config):
        sys.exit(f"{model} has no recurrent layers; expected a Qwen3.5")
    left = corrected_shapes(config.delta, jnp.bfloat16, slots, width)
    return config.layer_kinds.count("delta") * num_bytes(left)


if __name__ == "__main__":
    main()
