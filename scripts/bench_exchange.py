"""What a sum over several GPUs costs, with the residual sum and the norm after it, and whether it
always gives the same bits.

    python scripts/bench_exchange.py --devices 2 --implementations mosaic psum xla \
        --json docs/results/exchange-h200x2.json
    python scripts/bench_exchange.py --devices 2 --rows 512 --soak 600

mosaic is our kernel, psum XLA's sum, and xla the kernel's reference. To time a call, calls are
chained inside one compiled program: the norm that one call gives is the product of the next. Then
programs whose products differ between devices and calls are run, until there were --exchanges calls
and --soak seconds have passed. After each run all devices must have the bits of the first run, and
agree with the reference up to rounding.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measuring import about, milliseconds_per_call, tell, write_json

from pallas_kernels import add_norm
from pallas_kernels.exchange import (
    Memory,
    exchange_norm,
    inboxes_of,
    late_device,
    make_memory,
    specs_of,
)

AXIS, EPS = "devices", 1e-6
IMPLEMENTATIONS = "mosaic", "psum", "xla"
TABLE = 8
"""How many products each device has, which the calls use in turn when bits are compared."""
TOLERANCE = 2.0**-5
"""The most by which norms may differ from the reference's, relative to the largest: a few roundings
of bfloat16, because each call adds some."""


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    hidden: int
    devices: int
    calls: int
    """How many calls are chained in one program."""
    implementation: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that exchange something, and their inboxes."""

    mesh: Mesh
    memory: Memory

    def placed(self, array: Any, *spec: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, P(*spec)))


def group_of(devices: int, most_rows: int, hidden: int) -> Group:
    if devices > len(jax.devices()):
        raise SystemExit(f"--devices is {devices}, but jax sees {len(jax.devices())}")
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return Group(mesh, make_memory(mesh, most_rows * hidden * 2))


def one_call(implementation: str, x, product, scale, inboxes) -> tuple[Any, Any, Any]:
    if implementation == "psum":
        summed = jax.lax.psum(product, AXIS)[None]
        return *add_norm(x, summed, scale, eps=EPS, implementation="xla"), inboxes
    options = {"eps": EPS, "axis_name": AXIS, "implementation": implementation}
    return exchange_norm(x, product[None], scale, inboxes, **options)


def begun_together(x, inboxes):
    """Returns x unchanged, after a sum by XLA. A program with such a sum begins on no device before
    all devices have loaded its kernels. That is needed because a kernel that waits for another
    device may keep that device from loading."""
    nothing = jax.lax.psum(inboxes.late.sum(), AXIS)
    return x + nothing.astype(x.dtype)


def program(case: Case, group: Group, products_differ: bool) -> Callable[..., Any]:
    """Chained calls, as a function of the stream, the devices' products, a scale and the inboxes.
    Returns the stream, the last norm on each device, and the inboxes."""

    def chain(x, products, scale, inboxes):
        x, normed = begun_together(x, inboxes), products[0, 0]
        for call in range(case.calls):
            product = products[0, call % TABLE] + normed if products_differ else normed
            x, normed, inboxes = one_call(case.implementation, x, product, scale, inboxes)
            x = normed if products_differ else x  # so that the numbers stay small
        return x[None], normed[None], inboxes

    specs = specs_of(inboxes_of(group.memory), AXIS)
    takes, gives = (P(), P(AXIS), P(), specs), (P(AXIS), P(AXIS), specs)
    spread = jax.shard_map(chain, mesh=group.mesh, in_specs=takes, out_specs=gives, check_vma=False)
    return jax.jit(spread, donate_argnums=3)


def inputs(case: Case, group: Group) -> tuple:
    keys = jax.random.split(jax.random.key(0), 3)
    shape = case.rows, case.hidden
    make = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    products = make(keys[1], (case.devices, TABLE, *shape))
    place = group.placed
    return place(make(keys[0], shape)), place(products, AXIS), place(make(keys[2], shape[1:]))


def refuse_lateness(inboxes) -> None:
    """Ends the script if a device has waited in vain, because then its numbers are wrong."""
    if (late := late_device(np.asarray(inboxes.late))) is not None:
        raise SystemExit(f"device {late} did not send anything in time")


def microseconds(case: Case, group: Group, inboxes) -> tuple[dict[str, float], Any]:
    """Microseconds of one call in a chain."""
    run, given = program(case, group, products_differ=False), inputs(case, group)

    def call():
        nonlocal inboxes
        x, _, inboxes = run(*given, inboxes)
        return x

    jax.block_until_ready(call())
    jax.block_until_ready(call())
    times = milliseconds_per_call(call, calls=10)
    refuse_lateness(inboxes)
    return {name: 1e3 * ms / case.calls for name, ms in times.items()}, inboxes


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


class Bits:
    """Compares the bits of every run with those of the first run, and with the reference."""

    def __init__(self, case: Case, group: Group, inboxes):
        self.case, self.inboxes, self.exchanges = case, inboxes, 0
        self.run, self.given = program(case, group, products_differ=True), inputs(case, group)
        of_reference = dataclasses.replace(case, implementation="xla")
        apart = program(of_reference, group, products_differ=True)
        _, wanted, _ = apart(*self.given, inboxes_of(group.memory))
        self.wanted = np.asarray(wanted[0], np.float32)
        self.first: np.ndarray | None = None

    def compare(self) -> None:
        _, normed, self.inboxes = self.run(*self.given, self.inboxes)
        refuse_lateness(self.inboxes)
        found = bits(normed)
        self.first = found[0] if self.first is None else self.first
        self.exchanges += self.case.calls
        for device, of_device in enumerate(found):
            if (of_device != self.first).any():
                raise SystemExit(f"device {device}: other bits after {self.exchanges} exchanges")
        error = np.abs(np.asarray(normed[0], np.float32) - self.wanted).max()
        if not error <= TOLERANCE * np.abs(self.wanted).max():
            raise SystemExit(f"{error} away from the reference after {self.exchanges} exchanges")


def compared(case: Case, group: Group, inboxes, exchanges: int, soak: float) -> tuple[dict, Any]:
    """Runs exchanges until there were `exchanges` of them and `soak` seconds have passed."""
    begin, check = time.perf_counter(), Bits(case, group, inboxes)
    slowest = last = 0.0
    while check.exchanges < exchanges or time.perf_counter() - begin < soak:
        started = time.perf_counter()
        check.compare()
        last = time.perf_counter() - started
        slowest = max(slowest, last) if check.exchanges > case.calls else 0.0
    seconds = time.perf_counter() - begin
    numbers = {"exchanges_with_equal_bits": check.exchanges, "seconds": seconds}
    return numbers | {"slowest_program_ms": 1e3 * slowest}, check.inboxes


def measured(case: Case, group: Group, inboxes, options) -> tuple[dict[str, Any], Any]:
    times, inboxes = microseconds(case, group, inboxes)
    row = dataclasses.asdict(case) | {"us_per_call": times}
    if case.implementation == "psum":
        return row, inboxes
    equal, inboxes = compared(case, group, inboxes, options.exchanges, options.soak)
    return row | equal, inboxes


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 5120])
    parser.add_argument("--calls", type=int, default=64, help="exchanges of one program")
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["mosaic", "psum"]
    )
    parser.add_argument("--exchanges", type=int, default=10_000, help="of which bits are compared")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds for each case at least")
    parser.add_argument("--json", help="where to write the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options, begin = parsed(arguments), time.perf_counter()
    result: dict[str, Any] = about() | {"rows": []}
    for hidden in options.hidden:
        group = group_of(options.devices, max(options.rows), hidden)
        inboxes = inboxes_of(group.memory)
        for rows in options.rows:
            for implementation in options.implementations:
                case = Case(rows, hidden, options.devices, options.calls, implementation)
                row, inboxes = measured(case, group, inboxes, options)
                result["rows"].append(row)
                write_json(options.json, result)
                tell(f"{rows} x {hidden} {implementation}: {in_words(row)}", begin)


def in_words(row: dict[str, Any]) -> str:
    times = row["us_per_call"]
    words = f"{times['median']:.1f} us per call ({times['least']:.1f} to {times['most']:.1f})"
    if (exchanges := row.get("exchanges_with_equal_bits")) is None:
        return words
    return f"{words}; equal bits in {exchanges} exchanges"


if __name__ == "__main__":
    sys.exit(main())
