"""Random lives of requests; `scripts/run_random_lives.py` runs 100,000 of them."""

import collections
import dataclasses

import jaxtyping
import pytest
from random_lives import CONFIGS, Lives

from jaxspec.engine.schedule import ledger, page_index, pages


@pytest.fixture(autouse=True)
def without_checked_shapes(monkeypatch):
    """They take most of the time."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_every_life_ends_as_it_should_and_no_page_is_lost():
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(len(CONFIGS)):
        counts += Lives(seed).run(60)
    ends = sum(counts[end] for end in ("length", "stop", "abort", "error"))
    assert ends == 60 * len(CONFIGS)
    seldom = {name: counts[name] for name in ("abort", "faults", "resumed", "error", "stop")}
    assert min(seldom.values()) > 0, seldom
    often = {name: counts[name] for name in ("hits", "evicted", "shared", "passed", "length")}
    assert min(often.values()) > 100, often


def leaking(book, request, forget=False):
    """Keeps a page of a request that ends."""
    after = pages_release(book, request, forget)
    return dataclasses.replace(after, free=pages.removed(after.free, [*after.free][:1]))


def without_salts(index, chain, tokens):
    """Finds pages as if all salts were the same."""
    salts = {key[0] for key in index.entries if not isinstance(key[0], int)}
    found = (index_find(index, page_index.Chain(salt), tokens) for salt in salts)
    return max(found, key=len, default=()) if chain.pages == 0 else ()


def without_beginnings(index, chain, tokens):
    """Takes the same tokens for the same text, whatever comes before them."""
    by_tokens = {key[1]: entry for key, entry in index.entries.items()}
    found = []
    for at in range(chain.pages, (len(tokens) - 1) // index.page_size):
        entry = by_tokens.get(index.key(None, at, tokens)[1])
        if entry is None or entry in found:
            break
        found.append(entry)
    return tuple(found)


pages_release, index_find = pages.release, page_index.find


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (pages, "release", leaking),
        (page_index, "find", without_salts),
        (page_index, "find", without_beginnings),
    ],
)
def test_what_is_wrong_is_noticed(module, name, wrong, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    assert getattr(ledger, module.__name__.rpartition(".")[2]) is module
    with pytest.raises(AssertionError):
        Lives(0).run(200)
