"""An engine whose device does no work, but takes the time that was measured for each program.

`simulate_load.py` says where the times come from.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.acceptance.synthetic import from_length
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.step.device import Clock, Device
from jaxspec.engine.step.io import Models, StepResult
from jaxspec.engine.step.state import EngineState
from jaxspec.models.dflash import DFlash
from jaxspec.models.presets import dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.dflash import DFlashProposer

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SHAPE, BLOCK_SIZE, ACCEPTANCE_LENGTH = "qwen3-8b", 16, 6.54
CALL_MS = 2.7
MOST_SLOTS = 32
LONGEST = 16384
TOKEN = 5


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds of each kind of work."""

    decode: dict[int, float]
    """A decode step, by batch size."""
    least: float
    """The least time of any program that reads all weights."""
    per_token: float
    attention_per_pair: float
    """Attention of one token to one earlier token, in all layers."""
    per_program: float
    """The host's work for a program."""
    per_request: float
    """The host's work for a request whose result is read."""
    admission: float
    """The host's work until a request has its slot."""
    spread: tuple[float, float] | None = None
    """The 95th and the 99th percentile of a step's time, as multiples of the median; None if every
    program takes exactly its time."""

    def drawn(self, took: float, random: np.random.Generator) -> float:
        """A random time for one run of a program. It is longer than `took` as often as it is
        shorter, and never by more than the 99th percentile."""
        if self.spread is None:
            return took
        beyond = [0, *(factor - 1 for factor in self.spread)]
        off = np.interp(random.random(), (0, 0.9, 0.98), beyond)
        return took * (1 + random.choice((-1, 1)) * float(off))

    def mixed(self, batch: int, rows: int, pairs: int) -> float:
        """The time of a decode step that also reads `rows` rows of a prompt. A row is taken to cost
        as much as one more request, although a step also drafts for a request."""
        sizes, measured = [*self.decode], [*self.decode.values()]
        per_row = (measured[-1] - measured[-2]) / (sizes[-1] - sizes[-2])
        beyond = max(batch + rows - sizes[-1], 0) * per_row
        in_step = float(np.interp(batch + rows, sizes, measured)) + beyond
        return in_step + self.attention_per_pair * pairs

    def prefill(self, tokens: int, pairs: int) -> float:
        work = self.per_token * tokens + self.attention_per_pair * pairs
        return max(self.least, work + CALL_MS)


HALFWAY = 24
"""A batch size that engines have by default and whose steps were not measured."""


def read_times(unsteady: bool = False) -> Times:
    """The measured times. If `unsteady`, they vary as those of steps in the server did."""
    rows = results("steps-8b-h100.json")["rows"]
    decode = {row["concurrency"]: row["dflash_engine_ms"] for row in rows}
    decode[HALFWAY] = float(np.interp(HALFWAY, [*decode], [*decode.values()]))
    served = results("serving-h100.json")["server"]["step_ms"]
    prefill = results("prefill-8b-h100.json")["prefill"]
    steps = results("host-cpu.json")["step"]
    host = {one["requests"]: one["us"] / 1e3 for one in steps if not one["tokens_out"]}
    per_request = (host[32] - host[1]) / 31
    bench = results("bench-8b-h100.json")["rows"]
    waits = [row["queue_ms"]["p99"] for row in bench if row["concurrency"] == MOST_SLOTS]
    decoder = qwen3(SHAPE).decoder
    flop_per_pair = 4 * decoder.num_heads * decoder.head_dim * decoder.num_layers
    return Times(
        decode=dict(sorted(decode.items())),
        least=rows[0]["plain_engine_ms"],
        per_token=prefill["ms"] / (prefill["slots"] * prefill["tokens"]),
        attention_per_pair=flop_per_pair / prefill["tflop_s"] / 1e9,
        per_program=host[1] - per_request,
        per_request=per_request,
        admission=statistics.median(waits) / MOST_SLOTS,
        spread=(served["p95"] / served["p50"], served["p99"] / served["p50"]) if unsteady else None,
    )


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


# A device that takes time and does nothing


class SimulatedClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self.milliseconds = 0.0

    def now(self) -> float:
        return self.milliseconds / 1e3


class Result:
    """An array that the host can read when its program has ended."""

    def __init__(
        self, value: np.ndarray, ready: float, clock: SimulatedClock, host_work: float = 0.0
    ):
        self.value, self.ready, self.clock, self.host_work = value, ready, clock, host_work

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.clock.milliseconds = max(self.clock.milliseconds, self.ready) + self.host_work
        return self.value


class TimedDevice(Device):
    """A device on which a program takes its time and does nothing else."""

    def __init__(self, models: Models, plan: Plan, times: Times):
        super().__init__(models, {}, object.__new__(EngineState))  # nothing reads it
        self.times, self.plan = times, plan
        self.clock: SimulatedClock = SimulatedClock()
        self.rate = from_length(ACCEPTANCE_LENGTH, plan.block_size - 1).conditional_rates[0]
        self.free_at = 0.0
        """When the program that was launched last ends."""
        slots = plan.num_slots + 1
        self.lengths, self.limits, self.seeds = np.zeros((3, slots), int)
        self.busy = 0.0
        self.launched: list[tuple[str, int, int]] = []
        """Name, batch and width of every program that read tokens."""
        self.ended: list[float] = []
        """When each of these programs ended."""
        self.random = np.random.default_rng(0)

    def run(self, step: Any, *inputs: Any, **static: Any) -> Any:
        self.clock.milliseconds += self.times.per_program
        return getattr(self, step.__name__)(*map(_on_host, inputs), **static)

    def admit_step(self, packed: Any) -> None:
        admission = packed.admission
        slots = np.asarray(admission.slots)
        self.clock.milliseconds += self.times.admission
        self.lengths[slots] = admission.lengths
        self.limits[slots] = admission.limits
        self.seeds[slots] = admission.sampling.seed

    def prefill_step(self, packed: Any, draws: bool) -> StepResult:
        chunk = packed.chunk
        slots, starts, counts = map(np.asarray, (chunk.slots, chunk.starts, chunk.counts))
        batch, width = np.shape(chunk.tokens)
        self.lengths[slots] = starts + counts
        took = self.times.prefill(batch * width, int(np.sum(starts * counts)))
        self.launched.append(("prefill", batch, width))
        return self._result(took, np.ones(batch, int), np.zeros(batch, int), batch)

    def has(self, step: Any, *inputs: Any, **static: Any) -> bool:
        return True

    def mixed_step(
        self, slots: Any, num_drafts: Any, packed: Any, drafting: Any, draws: bool
    ) -> tuple[StepResult, StepResult]:
        chunk = packed.chunk
        [slot], [start], [count] = map(np.asarray, (chunk.slots, chunk.starts, chunk.counts))
        rows = np.size(chunk.tokens) // self.plan.width
        took = self.times.mixed(len(slots), rows, int(start * count))
        self.lengths[slot] = start + count
        decoded = self.decode_step(slots, num_drafts, drafting, draws, took)
        self.launched[-1] = ("mixed", *self.launched[-1][1:])
        return decoded, self._result(0.0, np.ones(1, int), np.zeros(1, int), 1)

    def decode_step(
        self,
        slots: Any,
        num_drafts: Any,
        drafting: Any,
        draws: bool,
        took: float | None = None,
    ) -> StepResult:
        slots, batch = np.asarray(slots), len(slots)
        active = self.lengths[slots] < self.limits[slots]
        drawn = [self._accepted(slot) for slot in slots]
        emitted = active * (np.array(drawn) + 1)
        self.lengths[slots] += emitted
        self.launched.append(("decode", batch, self.plan.width))
        took = self.times.decode[batch] if took is None else took
        return self._result(took, emitted, active * num_drafts, int(active.sum()))

    def _accepted(self, slot: int) -> int:
        random = np.random.default_rng((self.seeds[slot], self.lengths[slot]))
        rejected = random.random(self.plan.block_size - 1) >= self.rate
        return int(np.argmax([*rejected, True]))

    def _result(
        self, took: float, emitted: np.ndarray, drafts: np.ndarray, requests: int
    ) -> StepResult:
        took = self.times.drawn(took, self.random)
        self.free_at = max(self.free_at, self.clock.milliseconds) + took
        self.busy += took
        if took:
            self.ended.append(self.free_at)
        when = self.free_at, self.clock
        tokens = np.full((len(emitted), self.plan.width), TOKEN)
        result = object.__new__(StepResult)  # its fields are usually arrays of the device
        fields = {
            "tokens": Result(tokens, *when, host_work=self.times.per_request * requests),
            "emitted": Result(emitted, *when),
            "num_drafts": Result(np.asarray(drafts), *when),
            "logprobs": None,
            "prompt": None,
        }
        for name, value in fields.items():
            object.__setattr__(result, name, value)
        return result


def _on_host(value: Any) -> Any:
    return np.asarray(value) if hasattr(value, "copy_to_host_async") else value


def simulated_engine(times: Times, slots: int, **options: Any) -> Engine:
    """An engine of the 8B shape without weights."""
    config = qwen3(SHAPE)
    draft = dflash_for(config, BLOCK_SIZE)
    models = Models(
        Qwen3(config, draft.target_layer_ids, "bfloat16"),
        (DFlashProposer(DFlash(draft, "bfloat16")),),
    )
    sizes = tuple(size for size in times.decode if size < slots)
    given: dict[str, Any] = {
        "method": "dflash",
        "driver": "overlapped",
        "max_batch": slots,
        "max_model_len": LONGEST,
        "batch_sizes": (*sizes, slots),
        "synthetic_acceptance": ACCEPTANCE_LENGTH,
        "prefix_caching": False,
        "compile_ahead": False,
    }
    chosen = EngineOptions(**given | options)
    models, plan = plan_engine(models, chosen)
    pages = slots * plan.max_pages if chosen.num_pages is None else chosen.num_pages
    plan = dataclasses.replace(plan, num_pages=pages + 1)
    device = TimedDevice(models, plan, times)
    return Engine(Loop(device, lambda: device.state, plan, None), None, chosen)


def device_of(engine: Engine) -> TimedDevice:
    device = engine.loop.device
    assert isinstance(device, TimedDevice)
    return device
