"""Random lives of requests in an engine whose device is a hash (`fake_device.py`).

A life begins with a request's submission and ends with its last event: a whole answer, an abort, or
an error of its own. In between the engine may lose its state, and the request goes on from its
tokens. Prompts begin alike, continue earlier ones, and have salts. Pages are few, so free pages are
soon handed out again.

Every token is a hash of all that the request's pages hold, so an answer is right only if no page of
another text was read. For every page, the salt of the request that filled it is noted.
"""

import collections
import dataclasses
import random
from typing import Any

from book_checks import check_book, check_contents
from fake_device import CURSED, EOS, OVERFLOWS, continuation, fake_engine

from jaxspec.engine.requests.sampling_params import SamplingParams

CONFIGS: tuple[dict[str, Any], ...] = (
    {"driver": "overlapped", "method": "dflash"},
    {"driver": "overlapped", "method": "dflash", "num_slots": 5, "beside": 4, "num_pages": 40},
    {"driver": "overlapped", "method": "ngram", "num_pages": 17},
    {"driver": "lockstep", "method": "dflash+ngram"},
    {"driver": "overlapped", "method": "dflash", "exact": True},
    {"driver": "overlapped", "method": "none", "num_slots": 4, "num_pages": 33},
    {"driver": "overlapped", "method": "dflash", "num_snapshots": 5},
)
BEGINNINGS = ((), (7,) * 4, (1, 2, 3, 4, 5, 6, 7, 8), tuple(range(20, 36)))
"""Beginnings of prompts, of no, one, two and four pages."""
SALTS = (None, None, "a", "b")
FAULTS = ("before", "donated", "read", "unread")
LONGEST = 47
AT_ONCE = 8
"""Most requests that live at once, more than there are slots."""


@dataclasses.dataclass
class Life:
    """A request, and its expected outcome."""

    prompt: list[int]
    budget: int
    ignore_eos: bool
    cursed: bool
    salt: str | None
    told: list[int] = dataclasses.field(default_factory=list)
    resumed: bool = False

    @property
    def expected(self) -> list[int]:
        return continuation(self.prompt, self.budget, self.ignore_eos)


class Lives:
    """An engine, its live requests, and the outcomes of all others."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.engine = fake_engine(**CONFIGS[seed % len(CONFIGS)])
        self.loop, self.device = self.engine.loop, self.engine.loop.device
        self.device.curse = self.random.choice(("before", "donated", "read"))
        self.device.may_fail = lambda: not self.loop.ledger.suspects
        self.begin, self.loop._begin = self.loop._begin, self.begins
        self.live: dict[int, Life] = {}
        self.texts: dict[str | None, list[list[int]]] = collections.defaultdict(list)
        """By salt, the prompts and outputs of its requests."""
        self.filled_with: dict[int, str | None] = {}
        """The salt of the request that each page was last given to."""
        self.of_other_salts: list[tuple[int, int]] = []
        self.own_errors: list[Exception] = []
        self.known: set[tuple] = set()
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self, lives: int) -> collections.Counter[str]:
        """Runs `lives` lives from their beginnings to their ends, and counts what happened."""
        begun = 0
        while begun < lives or self.live:
            if begun < lives and len(self.live) < AT_ONCE and self.random.random() < 0.5:
                self.come()
                begun += 1
            if self.live:
                self.happen()
                self.step()
                self.check()
        self.check_end()
        self.counts["hits"] += self.loop.ledger.prefix_cache_hits
        return self.counts

    # What happens

    def come(self) -> None:
        salt, budget = self.random.choice(SALTS), self.random.randrange(1, 16)
        prompt = self.new_prompt(salt)[: LONGEST - budget]
        cursed = self.random.random() < 0.01
        prompt = [*prompt[:-1], CURSED] if cursed else prompt
        life = Life(prompt, budget, self.random.random() < 0.5, cursed, salt)
        params = SamplingParams(max_tokens=budget, ignore_eos=life.ignore_eos)
        asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        self.live[self.engine.submit(asked, params)] = life

    def new_prompt(self, salt: str | None) -> list[int]:
        rest = [self.random.randrange(1, OVERFLOWS) for _ in range(self.random.randrange(1, 8))]
        if self.texts[salt] and self.random.random() < 0.3:
            return [*self.random.choice(self.texts[salt]), *rest]
        return [*self.random.choice(BEGINNINGS), *rest]

    def happen(self) -> None:
        """Sometimes aborts a request, makes a program fail, or resets the prefix cache."""
        chance = self.random.random()
        if chance < 0.01:
            id = self.random.choice([*self.live])
            self.engine.abort([id])
            life = self.live.pop(id)
            assert life.told == life.expected[: len(life.told)], "another text"
            self.count("abort", life)
        elif chance < 0.02 and not self.device.faults:
            steps = self.random.randrange(4)
            self.device.faults = [*[None] * steps, self.random.choice(FAULTS)]
            self.counts["faults"] += 1
        elif chance < 0.021:
            self.engine.reset_prefix_cache()
            self.known = set()
            self.counts["forgotten"] += 1

    def step(self) -> None:
        for event in self.engine.step([*self.live]):
            life = self.live[event.index]
            life.told += event.token_ids
            if event.output is not None:
                self.end(event.index, event.output)

    def end(self, id: int, output: Any) -> None:
        life = self.live.pop(id)
        expected = life.expected
        assert list(output.token_ids) == life.told == expected[: len(life.told)], "another text"
        if life.cursed:
            assert output.finish_reason == "error" and output.error.startswith("Fault: ")
        else:
            stopped = not life.ignore_eos and life.told[-1:] == [EOS]
            assert output.error is None and life.told == expected
            assert output.finish_reason == ("stop" if stopped else "length")
            self.texts[life.salt] = [*self.texts[life.salt][-9:], [*life.prompt, *life.told]]
        self.count(output.finish_reason, life)

    def count(self, end: str, life: Life) -> None:
        self.counts[end] += 1
        self.counts["resumed"] += life.resumed

    def begins(self, beginning: Any) -> None:
        """Requests were given their pages, the first of them with what was found of their texts."""
        try:
            for one in beginning:
                self.note_pages(one.request.id, one.request.cache_salt)
        except Exception as error:
            self.own_errors.append(error)  # the engine takes it for a fault, and goes on
            raise
        self.begin(beginning)

    def note_pages(self, id: int, salt: str | None) -> None:
        found = self.loop.ledger.running[id].begins_at // self.loop.plan.page_size
        for at, page in enumerate(self.loop.ledger.book.held[id]):
            if at < found and self.filled_with[page] != salt:
                self.of_other_salts.append((id, page))  # an error here would be taken for a fault
            self.filled_with[page] = salt

    # What must be so

    def check(self) -> None:
        ledger, book = self.loop.ledger, self.loop.ledger.book
        assert not self.own_errors, f"what looks on is wrong: {self.own_errors[0]!r}"
        assert not self.of_other_salts, "pages of another salt were found"
        check_book(book, self.loop.plan.num_pages)
        assert set(book.held) == set(ledger.running)
        slots = [request.slot for request in ledger.running.values()]
        assert len(set(slots)) == len(slots)
        if self.loop.trusted and not self.device.state.deleted:
            check_contents(book, self.device.state.cells, self.device.state.context)
        self.check_order()
        for id, request in ledger.running.items():
            if id in self.live:
                self.live[id].resumed |= request.resumed > 0
        self.counts["shared"] += any(holders > 1 for holders in book.holders.values())
        entries = set(book.index.entries)
        if not ledger.suspects:
            self.counts["evicted"] += len(self.known - entries)
        self.known = entries

    def check_order(self) -> None:
        """Checks that the requests that pass a waiting one take no more pages than it needs, and
        one request more."""
        plan, ledger = self.loop.plan, self.loop.ledger
        assert [r.id for r in ledger.waiting] == sorted(r.id for r in ledger.waiting)
        for request in ledger.waiting:
            needed = ledger.book.pages_for(plan.positions_of(request.length_limit))
            assert request.passed_pages < needed + plan.max_pages
            self.counts["passed"] += request.passed_pages > 0

    def check_end(self) -> None:
        """Checks that no request holds a page and that no output is left to return."""
        while not self.loop.idle:
            self.loop.step()
        assert not self.loop.ledger.increments and not self.loop.ledger.book.holders
        assert self.engine.free_pages == self.engine.total_pages


def random_lives(first_seed: int, engines: int, each: int) -> collections.Counter[str]:
    """Runs lives in `engines` engines, one after the other, and counts what happened in them."""
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first_seed, first_seed + engines):
        counts += Lives(seed).run(each)
    return counts
