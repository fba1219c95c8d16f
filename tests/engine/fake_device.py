"""A device whose "model" is a hash function, so fast that tests can run the loop very many times.

Pages hold tokens. The next token is a hash of everything that a slot's pages hold, read through its
page table. So a page that belongs to two requests, a missing row or a stale row changes the output.
"""

import dataclasses
import math
import zlib

import jax
import numpy as np
from unpacked import chunk_of

from jaxspec.acceptance import accept
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan, shapes_for
from jaxspec.engine.requests.request import NOT_FINITE
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup.step_costs import costs_beside
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Drafting, Models, StepResult
from jaxspec.engine.step.packed import ADMISSION_COLUMNS, PackedChunk
from jaxspec.engine.step.state import EngineState
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen3Config
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.device import Drafts
from jaxspec.proposers.methods import METHODS
from jaxspec.sampling import TopLogprobs

VOCAB, EOS = 50, 0
CURSED = 49
"""Programs that read this token fail."""
OVERFLOWS, OVERFLOWS_AT = 48, 12
"""If a text has this token, its logits are not finite from this position on."""
WIDTH = 4
POISON, TRASH = -1, -2
DRAFTING = ("decode_step", "draft_step", "mixed_step")


class Fault(Exception):
    """The exception of a failing program."""


def next_token(history: list[int], seed: int = 0, drafted: bool = False) -> int:
    """The token after a text. If the request is sampled, it depends also on the seed and on whether
    there was a draft for the position, as it does if drafts are drawn."""
    assert min(history) >= 0, "the model read a row that nobody committed"
    if OVERFLOWS in history and len(history) >= OVERFLOWS_AT:
        return NOT_FINITE
    told = [*history, seed, drafted] if seed else history
    return zlib.crc32(np.array(told, np.int32).tobytes()) % OVERFLOWS


def score(history: list[int], following: int) -> float:
    """The log probability of the token after a text."""
    if OVERFLOWS in history and len(history) >= OVERFLOWS_AT:
        return float("nan")
    return -float(zlib.crc32(np.array([*history, 1000, following], np.int32).tobytes()) % 997)


def continuation(prompt: list[int], max_tokens: int, ignore_eos: bool) -> list[int]:
    """The tokens that the model gives a request that is alone, without drafts and not sampled."""
    tokens = []
    while len(tokens) < max_tokens and (ignore_eos or EOS not in tokens):
        if (token := next_token([*prompt, *tokens])) == NOT_FINITE:
            break
        tokens.append(token)
    return tokens


class Guesser:
    """A host proposer whose drafts, from the tokens that it was given, are right for a while."""

    def __init__(self):
        self.tokens: dict[int, list[int]] = {}

    def commit(self, request, tokens, num_drafts=0, accepted=0):
        self.tokens.setdefault(request, []).extend(tokens)

    def propose(self, request, room):
        history, drafts = self.tokens[request], []
        for place in range(min(room, 1 + sum(history) % WIDTH)):
            drafts.append(max(next_token(history + drafts), 0) + (place == 2))
        return drafts

    def release(self, request):
        self.tokens.pop(request, None)


class FakeState(EngineState):
    """A state of host arrays. The shapes are those of the real state; the pools hold tokens."""

    def __init__(self, plan: Plan):
        slots = plan.num_slots + 1
        put = lambda name, value: object.__setattr__(self, name, value)
        put("cells", np.full((plan.num_pages, plan.page_size), POISON))
        put("context", np.full((plan.num_pages, plan.page_size), POISON))
        put("page_table", np.zeros((slots, plan.max_pages), int))
        put("lengths", np.zeros(slots, int))
        put("limits", np.zeros(slots, int))
        put("last_tokens", np.zeros(slots, int))
        put("seeds", np.zeros(slots, int))
        put("deleted", False)
        # The text in the state that a recurrent layer has in each row; some rows have no slot.
        put("states", [()] * (slots + plan.num_snapshots) if plan.saves_every else None)

    @property
    def page_size(self) -> int:
        return self.cells.shape[1]

    def copy(self) -> "FakeState":
        twin = object.__new__(FakeState)
        for name, value in vars(self).items():
            object.__setattr__(twin, name, value.copy() if hasattr(value, "copy") else value)
        return twin

    def keep(self, slot: int, start: int, tokens: list[int]) -> None:
        """Updates the recurrent state of a slot, which must be of exactly the tokens before."""
        if self.states is not None and tokens:
            before = self.states[slot] if start else ()
            assert list(before) == self.read(self.cells, slot, start), "another text's state"
            self.states[slot] = (*before, *tokens)

    def read(self, pool: np.ndarray, slot: int, rows: int) -> list[int]:
        return [int(pool[self.cell(slot, at)]) for at in range(rows)]

    def write(self, pool: np.ndarray, slot: int, start: int, values: list[int]) -> None:
        for at, value in enumerate(values, start):
            page, offset = self.cell(slot, at)
            pool[page, offset] = value if page else TRASH

    def cell(self, slot: int, at: int) -> tuple[int, int]:
        table = self.page_table[slot]
        page = at // self.page_size
        return (int(table[page]) if page < len(table) else 0), at % self.page_size


class OnDevice:
    """A result that the host still has to read, which may fail."""

    def __init__(self, value: np.ndarray, error: Fault | None):
        self.value, self.error = value, error

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if self.error is not None:
            raise self.error
        return np.array(self.value)


def record(kind: type, **fields):
    """A record of this kind with these values, made without checks."""
    value = object.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(value, name, field)
    return value


class Everything(set):
    """A set that contains everything, so that no program has to be prepared."""

    def __contains__(self, _) -> bool:
        return True


class FakeDevice(Device):
    """Runs the steps on a FakeState. Each of the next runs has one of the `faults`, in their order:

    None     no fault
    before   the program never starts
    donated  the program fails after it was given the state, which is lost
    read     the program starts but fails later: its result and its state cannot be read
    unread   the program runs, but reading its result fails once
    """

    def __init__(self, models: Models, plan: Plan):
        super().__init__(models, {}, FakeState(plan))
        self.prepared = Everything()
        self.drawn = plan.drawn_drafts
        self.faults: list[str | None] = []
        self.curse = "before"
        self.may_fail = lambda: True
        self.ran: list[str] = []

    def run(
        self,
        step,
        *inputs,
        draws: bool = False,
        drafting: Drafting | None = None,
        num_tokens: int | None = None,
    ):
        name, fault = step.__name__, None
        for observer in tuple(self.observers):
            observer.program(step, inputs, {"draws": draws, "drafting": drafting})
        if self.faults and name != "admit_step" and self.may_fail():
            fault = self.faults.pop(0)
        state = self.state
        if state.deleted:
            raise Fault(f"{name} was given a state that is gone")
        self.ran.append(name if drafting or name != "decode_step" else "plain")
        if fault is None and self._is_cursed(name, inputs):
            fault = self.curse
        if fault == "before":
            raise Fault(f"{name} did not start")
        after = state.copy()
        extra = {"drafting": drafting} if name in DRAFTING else {}
        if name == "verify_step":
            extra = {"num_tokens": num_tokens}
        result = getattr(self, name)(after, *inputs, **extra)
        object.__setattr__(state, "deleted", True)
        if fault == "donated":
            raise Fault(f"{name} ran out of memory")
        if fault == "read":
            object.__setattr__(after, "deleted", True)
        self.state = after
        if name == "mixed_step":
            return tuple(self._step_result(part, fault) for part in result)
        return self._step_result(result, fault) if isinstance(result, tuple) else result

    def has(self, step, *inputs, **static) -> bool:
        return True

    def accept_on_host(self, drafts, verified):
        fetched = (drafts.tokens, verified.tokens, verified.num_drafts)
        return accept(*map(np.asarray, fetched))

    def discard_state(self) -> None:
        object.__setattr__(self.state, "deleted", True)

    def free(self) -> None:
        self.discard_state()

    def _is_cursed(self, step: str, inputs: tuple) -> bool:
        if step in ("admit_step", "copy_step", "replace_step"):
            return False
        chunks = [chunk_of(part) for part in inputs if isinstance(part, PackedChunk)]
        slots = [] if step == "prefill_step" else np.asarray(inputs[0]).tolist()
        slots += [slot for chunk in chunks for slot in np.asarray(chunk.slots).tolist()]
        held = [self.state.read(self.state.cells, s, self.state.lengths[s]) for s in slots]
        read = [np.asarray(chunk.tokens) for chunk in chunks]
        return any(CURSED in tokens for tokens in (*held, *read))

    def _step_result(self, result: tuple, fault: str | None) -> StepResult:
        error = Fault("its result cannot be read") if fault in ("read", "unread") else None
        tokens, emitted, num_drafts = (OnDevice(np.array(x), error) for x in result[:3])
        none = OnDevice(np.zeros((len(result[1]), 99, 0)), error)
        logprobs = record(TopLogprobs, chosen=none, values=none, tokens=none)
        fields = {"tokens": tokens, "emitted": emitted, "num_drafts": num_drafts}
        if len(result) > 3 and result[3] is not None:
            chosen = OnDevice(result[3], error)
            fields["prompt"] = record(TopLogprobs, chosen=chosen, values=none, tokens=none)
        return record(StepResult, logprobs=logprobs, **fields)

    # The steps

    def admit_step(self, state, packed):
        rows = np.asarray(packed.integers)
        slots, lengths, limits, _, seeds = rows[:, :ADMISSION_COLUMNS].T
        state.page_table[slots] = rows[:, ADMISSION_COLUMNS:]
        state.lengths[slots] = lengths
        state.limits[slots] = limits
        hot = np.asarray(packed.fractions)[:, 0] > 0
        state.seeds[slots] = np.where(hot, seeds.astype(np.uint32) + 1, 0)

    def copy_step(self, state, source, target):
        state.states[int(target)] = state.states[int(source)]

    def prefill_step(self, state, packed):
        chunk = chunk_of(packed)
        columns = chunk.slots, chunk.starts, chunk.counts, chunk.known
        rows = zip(*(np.asarray(x).tolist() for x in columns))
        said = []
        for tokens, (slot, start, count, known) in zip(np.asarray(chunk.tokens).tolist(), rows):
            state.keep(slot, start, tokens[:count])
            state.write(state.cells, slot, start, tokens[:count])
            state.write(state.context, slot, start, tokens[:count])
            end, seed = start + count, int(state.seeds[slot])
            said.append(next_token(state.read(state.cells, slot, end), seed) if count else 0)
            state.lengths[slot] = end
            state.last_tokens[slot] = max(said[-1] if known < 0 else known, 0)
        scores = None if chunk.following is None else self._scores(state, chunk)
        return [[token] for token in said], [1] * len(said), [0] * len(said), scores

    def _scores(self, state, chunk):
        columns = chunk.slots, chunk.starts, chunk.counts, chunk.following
        scores = np.zeros(chunk.tokens.shape)
        for line, (slot, start, count, following) in enumerate(zip(*map(np.asarray, columns))):
            for at in range(count):
                read = state.read(state.cells, slot, start + at + 1)
                scores[line, at] = score(read, following[at])
        return scores

    def draft_step(self, state, slots, num_drafts, drafting):
        count = drafting.width - 1
        drafts = [self._draft(state, slot)[:count] for slot in np.asarray(slots).tolist()]
        if drafting.num_tokens is not None:
            num_drafts = self._shared_out(state, slots, num_drafts, drafting.num_tokens)
        return Drafts(jax.device_put(np.array(drafts, np.int32)), num_drafts)

    def _shared_out(self, state, slots, num_drafts, num_tokens: int):
        """Shares tokens out from the last request to the first, so that some get all that they want
        and some get nothing."""
        active = (state.lengths < state.limits)[np.asarray(slots)]
        shares, left = np.where(active, np.asarray(num_drafts), 0), num_tokens - active.sum()
        for row in reversed(range(len(shares))):
            shares[row] = min(shares[row], left)
            left -= shares[row]
        return jax.device_put(shares.astype(np.int32))

    def replace_step(self, state, drafts, of_host):
        ours, theirs = np.asarray(drafts.num_drafts), np.asarray(of_host.num_drafts)
        tokens = np.where(
            (theirs > 0)[:, None], np.asarray(of_host.tokens), np.asarray(drafts.tokens)
        )
        return Drafts(*jax.device_put((tokens, np.where(theirs > 0, theirs, ours))))

    def _draft(self, state, slot) -> list[int]:
        """Drafts that are right for a while and then wrong, made from the drafter's context, which
        must equal the target's."""
        length = state.lengths[slot]
        if length >= state.limits[slot]:
            return [0] * (WIDTH - 1)
        history = state.read(state.context, slot, length)
        assert history == state.read(state.cells, slot, length), "context is not of these tokens"
        state.write(state.context, slot, length, [POISON] * WIDTH)
        drafts, seed = [int(state.last_tokens[slot])], int(state.seeds[slot])
        while len(drafts) < WIDTH:
            drafts.append(max(next_token(history + drafts, seed, self.drawn), 0))
        right = sum(history) % WIDTH
        return [d if i < right else (d + 1) % OVERFLOWS for i, d in enumerate(drafts[1:])]

    def verify_step(self, state, slots, drafts, num_tokens=None):
        active, said = [], []
        rows = zip(*(np.asarray(x).tolist() for x in (slots, drafts.tokens, drafts.num_drafts)))
        for slot, proposed, count in rows:
            length, seed = int(state.lengths[slot]), int(state.seeds[slot])
            active.append(int(length < state.limits[slot]))
            block = [int(state.last_tokens[slot]), *proposed]
            if not active[-1]:
                said.append([0] * len(block))
                continue
            text = state.read(state.cells, slot, length)
            drawn = [self.drawn and i < count for i in range(len(block))]
            said.append([next_token(text + block[: i + 1], seed, d) for i, d in enumerate(drawn)])
            state.write(state.cells, slot, length, block[: count + 1])
        count = (np.array(active) * np.asarray(drafts.num_drafts)).astype(np.int32)
        if num_tokens is not None:
            assert (count + np.array(active)).sum() <= num_tokens, "more than the step has room for"
        return Said(np.array(said, np.int32), count, np.array(active))

    def commit_step(self, state, slots, verified, accepted):
        emitted = verified.active * (np.asarray(accepted) + 1)
        for row, slot in enumerate(np.asarray(slots).tolist()):
            if not emitted[row]:
                continue
            length = int(state.lengths[slot])
            kept = state.read(state.cells, slot, length + int(emitted[row]))[length:]
            state.keep(slot, length, kept)
            state.write(state.context, slot, length, kept)
            state.lengths[slot] += emitted[row]
            state.last_tokens[slot] = max(verified.tokens[row, emitted[row] - 1], 0)
        return verified.tokens, emitted, verified.num_drafts

    def accept_step(self, state, slots, drafts, verified):
        accepted = []
        for proposed, said, count in zip(
            np.asarray(drafts.tokens).tolist(), verified.tokens.tolist(), verified.num_drafts
        ):
            right = [a == b for a, b in zip(proposed[:count], said)] + [False]
            accepted.append(right.index(False))
        return self.commit_step(state, slots, verified, accepted)

    def decode_step(self, state, slots, num_drafts, drafting):
        count = len(slots)
        drafts = Drafts(
            *jax.device_put((np.zeros((count, 0), np.int32), np.zeros(count, np.int32)))
        )
        if drafting is not None:
            drafts = self.draft_step(state, slots, num_drafts, drafting)
        verified = self.verify_step(state, slots, drafts, drafting and drafting.num_tokens)
        return self.accept_step(state, slots, drafts, verified)

    def mixed_step(self, state, slots, num_drafts, packed, drafting):
        """The chunk is read before the requests commit, and its own slot commits after them."""
        chunk = chunk_of(packed)
        assert not {*chunk.slots.tolist()} & {*np.asarray(slots).tolist()}
        first = self.prefill_step(state, packed)
        return self.decode_step(state, slots, num_drafts, drafting), first


@dataclasses.dataclass(frozen=True)
class Said:
    """The result of verify, which commit takes."""

    tokens: np.ndarray
    num_drafts: np.ndarray
    active: np.ndarray


def fake_models() -> Models:
    rope = Rope(theta=1e4)
    decoder = Decoder(8, 8, 1, 1, 1, 8, 1e-6, rope, 10_000)
    return Models(Qwen3(Qwen3Config(decoder, VOCAB, True, (EOS,))))


def fake_engine(
    driver: str = "overlapped",
    method: str = "dflash",
    exact: bool = False,
    num_slots: int = 3,
    page_size: int = 4,
    num_pages: int = 25,
    max_model_len: int = 48,
    prefill_chunk: int = 5,
    prefill_budget: int = 15,
    adaptive: bool = False,
    shares_tokens: bool = False,
    prefix_caching: bool = True,
    num_snapshots: int = 0,
    beside: int = 0,
) -> Engine:
    uses = METHODS[method]
    on_device = uses.device is not None and driver == "overlapped"
    host_drafts = uses.host is not None and not on_device
    widths = (1, 2, WIDTH) if adaptive and uses.drafter else ()
    shapes = shapes_for(num_slots, prefill_chunk, exact)
    halts = math.lcm(page_size, shapes.widest_chunk) if exact else page_size
    plan = Plan(
        method=method,
        driver=driver,
        exact=exact,
        width=1 if method == "none" and not exact else WIDTH,
        block_size=WIDTH,
        num_slots=num_slots,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        shapes=shapes,
        admitted_at_once=shapes.largest_prefill,
        widths=widths,
        shares_tokens=shares_tokens,
        proposer=0 if uses.drafter or on_device else None,
        drafter=uses.drafter,
        drawn_drafts=uses.drafter and not exact,
        host_drafts=host_drafts,
        reads_before_decoding=host_drafts or driver == "lockstep",
        prefill_budget=prefill_budget,
        prefix_caching=prefix_caching,
        saves_every=halts if num_snapshots else 0,
        num_snapshots=num_snapshots,
        beside=beside,
    )
    device = FakeDevice(fake_models(), plan)
    proposer = Guesser() if uses.host is not None else None
    sizes = plan.shapes.batch_sizes
    costs = {(batch, width): 1.0 for batch in sizes for width in plan.choices_of(batch)}
    adaptive = None
    if widths:
        # Times are not learned, because runs with the same seeds must run the same lines.
        adaptive = AdaptiveWidth(costs, shares_tokens, False, costs_beside(plan, costs))
    loop = Loop(device, lambda: FakeState(plan), plan, None, proposer, adaptive)
    return Engine(loop, None, EngineOptions())


assert jax.tree.leaves(record(TopLogprobs, chosen=1, values=2, tokens=3)) == [1, 2, 3]
