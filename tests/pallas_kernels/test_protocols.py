"""How thread blocks wait for each other and who sends what to whom.

The interpreter has neither mailbox nor grid barrier, so the kernels' own code is run here thread
block after thread block, with stand-ins that note down what is sent, signalled and waited for.
"""

import collections
import dataclasses
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_chain import ChainShape, kernel, rounded, rows
from pallas_kernels.dense_chain.fp8 import Fp8Chain
from pallas_kernels.dense_chain.loading import Shares
from pallas_kernels.dense_chain.phases import Phase
from pallas_kernels.dense_chain.plan import (
    CONSUMERS,
    DOWN,
    EIGHT,
    GATE_UP,
    MORE_DOWN,
    MORE_OUT,
    NEXT_QKV,
    OUT,
    PAIR,
    STAGE,
    Plan,
    boxes_of_tile,
)
from pallas_kernels.dense_chain.shape import BARRIERS, NEIGHBOURS, UNIT
from pallas_kernels.dense_chain.sizes import choose_sizes
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.mailbox import Mailbox
from pallas_kernels.paged_attention import splits
from pallas_kernels.paged_attention.blocks import TILE_ROWS

TOKENS = [8, 16, 24, 32, 40, 48, 56, 64]
MORE_TOKENS = [72, 96, 104, 128]
"""Only with rows in 8 bits."""


def plan_of(
    tokens: int,
    pairs: int = 3,
    qkv: int = 384,
    hidden: int = 512,
    rounds: bool = False,
) -> Plan:
    shape = ChainShape(tokens, 512, hidden, 512, qkv)
    if rounds:
        shape = dataclasses.replace(shape, scaled="blocks", quantised_inputs=True)
    return Plan(shape, 1e-6, jnp.bfloat16, pairs, choose_sizes(shape), None)


def now(condition):
    """`pl.when` for conditions that are known."""
    return lambda run: run() if bool(condition) else None


class TestAllBlocksMeet:
    """Between two products every thread block waits until all have finished the first one."""

    @pytest.fixture
    def events(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
        seen: list[tuple] = []
        note = lambda *event: seen.append(event)
        barrier = types.SimpleNamespace(
            arrive=lambda counters, p: note("arrive", p),
            wait=lambda counters, p, calls, arrivals: note("wait", p, arrivals),
        )
        monkeypatch.setattr(kernel, "grid_barrier", barrier)
        monkeypatch.setattr(kernel, "fence_async", lambda: note("fence"))
        monkeypatch.setattr(kernel.pl, "when", now)
        return seen

    def chain(self, plan: Plan, events: list[tuple], idle: tuple[int, ...] = ()) -> Any:
        """A thread block that has a part in all products but these."""
        chain: Any = object.__new__(kernel.Chain)
        chain.plan, chain.scratch = plan, {}
        chain.refs = {"counters": None, "calls": None}
        active = {p: p not in idle for p in plan.products}
        chain.shares = types.SimpleNamespace(products=plan.products, active=active)
        chain.multiply_product = lambda p: events.append(("product", p))
        chain.round_rows = lambda phase: events.append(("rounded", phase.stage))
        return chain

    @pytest.mark.parametrize("hidden", [512, 1024])
    @pytest.mark.parametrize("qkv", [384, 768, 0])
    @pytest.mark.parametrize("pairs", [1, 3, 8, 66])
    @pytest.mark.parametrize("rounds", [False, True])
    def test_they_wait_for_as_many_arrivals_as_there_are(
        self, events, monkeypatch, rounds, pairs, qkv, hidden
    ):
        plan = plan_of(16, pairs, qkv, hidden, rounds)
        monkeypatch.setattr(Mailbox, "wait_for_barriers", lambda self: None)
        for _ in range(plan.blocks * CONSUMERS):
            self.chain(plan, events).multiply_all()
        assert [p for _, p in (event for event in events if event[0] == "product")] == [
            *plan.products
        ] * (plan.blocks * CONSUMERS)
        arrivals = collections.Counter(event[1] for event in events if event[0] == "arrive")
        begun = set()
        for p in plan.products:
            events.clear()
            self.chain(plan, events).wait_for_rows_of(p)
            before = STAGE[p] if rounds else STAGE[p] - 1
            waited = [("wait", before, arrivals[before]), ("fence",)]
            assert events == (waited if before >= 0 and STAGE[p] not in begun else [])
            begun.add(STAGE[p])
        assert sorted(arrivals) == list(range(BARRIERS if rounds else BARRIERS - 1))

    @pytest.mark.parametrize("idle", [(GATE_UP, NEXT_QKV), (OUT, DOWN)])
    def test_a_block_without_a_share_arrives_as_well(self, events, monkeypatch, idle):
        monkeypatch.setattr(Mailbox, "wait_for_barriers", lambda self: None)
        plan = plan_of(16, pairs=8)
        self.chain(plan, events, idle).multiply_all()
        assert [event[1] for event in events if event[0] == "arrive"] == list(range(BARRIERS - 1))
        assert [event[1] for event in events if event[0] == "product"] == [
            p for p in (OUT, GATE_UP, DOWN, NEXT_QKV) if p not in idle
        ]

    @pytest.mark.parametrize("hidden", [512, 1024])
    def test_a_product_is_finished_before_its_arrival(self, events, monkeypatch, hidden):
        monkeypatch.setattr(Mailbox, "wait_for_barriers", lambda self: None)
        plan = plan_of(16, pairs=8, hidden=hidden)
        self.chain(plan, events).multiply_all()
        assert (MORE_OUT in plan.products) == (MORE_DOWN in plan.products) == (hidden > 512)
        for p in plan.products:
            if STAGE[p] < BARRIERS - 1:
                assert events.index(("product", p)) < events.index(("arrive", STAGE[p]))

    def test_rows_are_rounded_between_a_product_and_its_arrival(self, events, monkeypatch):
        """But for those of down, which the product before rounds."""
        monkeypatch.setattr(Mailbox, "wait_for_barriers", lambda self: None)
        self.chain(plan_of(16, pairs=8, rounds=True), events).multiply_all()
        assert events == [
            ("rounded", 0),
            ("arrive", 0),
            ("product", OUT),
            ("rounded", 1),
            ("arrive", 1),
            ("product", GATE_UP),
            ("arrive", 2),
            ("product", DOWN),
            ("rounded", 3),
            ("arrive", 3),
            ("product", NEXT_QKV),
        ]


class Places:
    """A reference of which only the places are seen that are asked for."""

    at = property(lambda self: self)

    def __getitem__(self, places):
        return places


@pytest.mark.parametrize("hidden", [512, 1024])
@pytest.mark.parametrize("tokens", TOKENS + MORE_TOKENS)
class TestNeighboursOfTheChain:
    """Two tiles of the residual stream are rounded by the warpgroups that have finished them."""

    @pytest.fixture
    def seen(self, monkeypatch, tokens, hidden) -> list[tuple]:
        """All that happens after the product with down, thread block after thread block: ("arrive",
        barrier, piece, finisher), ("wait", barrier, arrivals) and ("rounds", piece, first row)."""
        plan = plan_of(tokens, pairs=8, hidden=hidden, rounds=True)
        found: list[tuple] = []
        who: list[tuple] = []
        zeros = lambda places, _: jnp.zeros([place.size for place in np.atleast_1d(places)])
        barrier = types.SimpleNamespace(
            arrive=lambda place, _: found.append(("arrive", int(place.start), *who[-1])),
            wait=lambda place, _, calls, arrivals: found.append(
                ("wait", int(place.start), arrivals)
            ),
        )
        monkeypatch.setattr(rounded, "grid_barrier", barrier)
        monkeypatch.setattr(rounded.pl, "when", now)
        monkeypatch.setattr(rounded, "load", zeros)
        monkeypatch.setattr(Fp8Chain, "add_to_stream", lambda self, p: None)
        names = "counters", "calls", "total", "next_norm"
        for pair, half, warpgroup in np.ndindex(plan.pairs, PAIR, CONSUMERS):
            chain: Any = object.__new__(rounded.RoundedChain)
            shares: Any = object.__new__(Shares)
            shares.plan, shares.pair, shares.half = plan, pair, half
            chain.plan, chain.shares, chain.warpgroup = plan, shares, warpgroup
            chain.refs = {name: Places() for name in names}
            chain.rows = rows.Rows(plan, chain.refs, {}, shares, warpgroup)
            chain.write_piece = lambda stage, piece, places, _: found.extend(
                ("rounds", int(piece), int(places.start) + i) for i in range(0, places.size, EIGHT)
            )
            for p in plan.products_of(Phase(STAGE[DOWN])):
                if bool(shares.has(p)):
                    who.append((int(shares.tile(p)) // 2, half * CONSUMERS + warpgroup))
                    chain.add_to_stream(p)
            chain.round_rows(Phase(STAGE[NEXT_QKV], rounds=True))
        return found

    def test_everything_is_rounded_once(self, seen, tokens, hidden):
        done = sorted(event[1:] for event in seen if event[0] == "rounds")
        wanted = itertools.product(range(hidden // BLOCK), range(0, tokens, EIGHT))
        assert done == sorted(wanted)

    def test_they_wait_for_the_two_that_have_finished_the_same_rows(self, seen, hidden):
        arrived = collections.defaultdict(list)
        for _, barrier, *finisher in (event for event in seen if event[0] == "arrive"):
            arrived[barrier].append(finisher)
        assert len(arrived) == hidden // BLOCK * PAIR * CONSUMERS
        assert all(first == second for first, second in arrived.values())
        waits = collections.Counter(event[1:] for event in seen if event[0] == "wait")
        assert waits == {(barrier, 2): 2 for barrier in arrived}
        assert all(BARRIERS <= barrier < BARRIERS + NEIGHBOURS for barrier in arrived)


class Letters:
    """A mailbox whose letters are kept: by receiving thread block, box and place in the box."""

    def __init__(self, boxes: int):
        self.boxes, self.sent, self.block = boxes, {}, 0
        self.read_boxes: list[tuple[int, int]] = []

    def wait_for_barriers(self) -> None:
        pass

    def write(self, scratch, box, message, block, arrays, layouts) -> None:
        assert 0 <= int(box) < self.boxes
        address = int(block), int(box), int(message)
        assert address not in self.sent, "a letter on top of another"
        self.sent[address] = self.block, tuple(arrays)

    def read(self, scratch, box, earlier_reads, shapes, layouts) -> list[tuple]:
        self.read_boxes.append((self.block, int(box)))
        found = {m: arrays for (to, b, m), (_, arrays) in self.sent.items()
                 if (to, b) == (self.block, int(box))}  # fmt: skip
        for arrays in found.values():
            assert [array.shape for array in arrays] == [tuple(shape) for shape in shapes]
        return [found[m] for m in sorted(found)]


@pytest.mark.parametrize(
    ("tokens", "rounds"),
    [(tokens, False) for tokens in TOKENS] + [(tokens, True) for tokens in TOKENS + MORE_TOKENS],
)
class TestPairsOfTheChain:
    """Two thread blocks have summed halves of the inputs; each finishes half of the groups."""

    def rows_of(self, plan: Plan, letters: Letters, half: int, warpgroup: int) -> rows.Rows:
        names = ["shape", "groups", "groups_each", "repeated_groups", "one_phase", "dtype"]
        names += ["group", "rows_each"]
        kept = types.SimpleNamespace(mailbox=letters, **{n: getattr(plan, n) for n in names})
        shares = types.SimpleNamespace(half=half, pair=0, columns=lambda p: 0)
        letters.block = half
        transposed = types.SimpleNamespace(at=[np.zeros((plan.group, UNIT))] * CONSUMERS)
        scratch: dict[str, Any] = {"transposed": transposed}
        made: Any = object.__new__(rows.Rows)
        fields = {"plan": kept, "scratch": scratch, "shares": shares, "warpgroup": warpgroup}
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def test_a_second_tile_has_boxes_of_its_own(self, tokens, rounds):
        """Its sums may be sent before those of the first tile were read."""
        options = {"pairs": 8, "rounds": rounds}
        plan, tall = plan_of(tokens, **options), plan_of(tokens, hidden=1024, **options)
        of_tile = boxes_of_tile(tokens, plan.group)
        assert tall.mailbox.boxes == 2 * plan.mailbox.boxes == 2 * of_tile

    @pytest.mark.parametrize("p", [OUT, MORE_OUT])
    def test_every_group_is_finished_once_from_both_halves(self, tokens, rounds, monkeypatch, p):
        plan = plan_of(tokens, pairs=8, hidden=512 if p == OUT else 1024, rounds=rounds)
        letters = Letters(plan.mailbox.boxes)
        halves = np.random.default_rng(0).normal(size=(PAIR, UNIT, tokens)).astype(np.float32)
        monkeypatch.setattr(rows, "pl", types.SimpleNamespace(when=now, ds=rows.pl.ds))
        monkeypatch.setattr(
            rows, "plgpu", types.SimpleNamespace(layout_cast=lambda array, _: np.asarray(array))
        )
        monkeypatch.setattr(rows, "load", lambda transposed, layout: transposed)

        pair_sums = {}
        for half in range(PAIR):
            for warpgroup in range(CONSUMERS):
                mine = self.rows_of(plan, letters, half, warpgroup)
                first = int(mine.first) * plan.group
                acc = jnp.asarray(halves[half][:, first : first + plan.rows_each])
                pair_sums[half, warpgroup] = mine, mine.by_mailbox(p, acc)

        finished = {}
        for (half, _), (mine, pair_sum) in pair_sums.items():
            letters.block = half
            for i in range(plan.groups_each):
                if bool(mine.stores(i)) and int(mine.finisher(i)) == half:
                    group = int(mine.first) + i
                    assert group not in finished, "two thread blocks finish one group"
                    finished[group] = np.array(pair_sum(i, None))
        assert sorted(finished) == list(range(plan.groups))
        assert len(letters.sent) == plan.groups == len(set(letters.read_boxes))
        first_tile = range(boxes_of_tile(tokens, plan.group))
        assert all((box in first_tile) == (p == OUT) for _, box, _ in letters.sent)
        for group, found in finished.items():
            columns = slice(group * plan.group, (group + 1) * plan.group)
            np.testing.assert_allclose(found, halves.sum(0)[:, columns].T, rtol=1e-6)
        assert all(receiver != writer for (receiver, *_), (writer, _) in letters.sent.items())


@pytest.mark.parametrize("count", [2, 4, 8])
def test_splits_of_a_context_add_up_to_attention_over_all_of_it(count, monkeypatch):
    """Each split sends maximum, total and columns; what arrives is the softmax over all tiles."""
    head_dim, positions = 64, 16 * count
    keys = jax.random.split(jax.random.key(0), 2)
    scores = 5 * jax.random.normal(keys[0], (TILE_ROWS, positions))
    scores = scores.at[3, positions // count :].set(-1e30)  # seen by the first split only
    values = jax.random.normal(keys[1], (positions, head_dim))
    letters = Letters(boxes=1)
    monkeypatch.setattr(splits.Exchange, "mailbox", letters)
    exchange = splits.Exchange(count, head_dim, 1, mailed=True, interpreted=False)

    def sums(split: int):
        own = slice(split * positions // count, (split + 1) * positions // count)
        m = scores[:, own].max(axis=1)
        weights = jnp.exp2(scores[:, own] - m[:, None])
        return m, weights.sum(axis=1), weights @ values[own]

    for split in range(count):
        letters.block = split
        exchange.through_shared_memory(sums(split), split, 0, {})
    assert len(letters.sent) == count * count
    columns = []
    for split in range(count):
        letters.block = split
        shapes = ((TILE_ROWS,), (TILE_ROWS,), (TILE_ROWS, exchange.columns))
        columns.append(splits.add(letters.read({}, 0, 0, shapes, ())))
    weights = jnp.exp2(scores - scores.max(axis=1, keepdims=True))
    wanted = weights @ values / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(jnp.concatenate(columns, axis=1), wanted, rtol=1e-4, atol=1e-5)
