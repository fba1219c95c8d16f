"""jaxspec as a library in your own loop: your own proposer and acceptance rule; features returned.

    python examples/research_loop.py
    python examples/research_loop.py --model DIR --draft-model DIR --prompt "def quicksort(" \
        --tolerance 0.5 --features features.npz

The engine's host loop is not used. The steps are pure functions (models, params, state,
inputs) -> (state, result); `Device` compiles them and keeps the current state. Between draft and
verify, and between verify and commit, every value is an array that you can inspect or replace.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import cli
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Admission, Drafting, PromptChunk, Verified
from jaxspec.engine.step.packed import packed_admission, packed_chunk
from jaxspec.engine.step.state import empty_state
from jaxspec.engine.step.steps import (
    admit_step,
    commit_step,
    draft_step,
    prefill_step,
    verify_step,
)
from jaxspec.proposers.device import Drafts
from jaxspec.sampling import SlotSampling

PAGE_SIZE = 64
SLOT = 0


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of a run."""

    tokens: list[int]
    acceptance_lengths: list[int]
    features: np.ndarray
    """The target's features of every token committed after the prompt: [tokens, features]."""


Proposer = Callable[[list[int], np.ndarray], np.ndarray]
"""(all tokens so far, the drafter's drafts) -> as many drafts."""
AcceptanceRule = Callable[[np.ndarray, Verified], int]
"""(drafts, the target's results for them) -> how many to keep."""


def look_back_or_drafter(history: list[int], drafted: np.ndarray) -> np.ndarray:
    """Proposes what followed the newest earlier occurrence of the last three tokens; if there is
    none, or for the drafts that it does not fill, it proposes the drafter's."""
    last = history[-3:]
    for start in range(len(history) - 4, -1, -1):
        if history[start : start + 3] == last:
            followed = history[start + 3 : start + 3 + len(drafted)]
            return np.array([*followed, *drafted[len(followed) :]], np.int32)
    return drafted


def within(nats: float) -> AcceptanceRule:
    """A rule that keeps drafts until one is less likely than the target's likeliest token by more
    than `nats` of log probability. With 0 it is lossless."""

    def keep(drafts: np.ndarray, verified: Verified) -> int:
        tops = jax.tree.map(lambda leaf: np.asarray(leaf[0]), verified.logprobs)
        for place, draft in enumerate(drafts):
            ranks = np.flatnonzero(tops.tokens[place] == draft)
            if not len(ranks) or tops.values[place, 0] - tops.values[place, ranks[0]] > nats:
                return place
        return len(drafts)

    return keep


def run(
    opened: Opened, prompt: list[int], tokens: int, propose: Proposer, keep: AcceptanceRule
) -> Generation:
    """Repeats draft, propose, verify, accept and commit until there are `tokens` new tokens."""
    device = seated(opened, len(prompt) + tokens)
    slots = jnp.array([SLOT], jnp.int32)
    most = opened.models.proposers[0].num_drafts
    drafting, wanted = Drafting(0, most + 1), jnp.array([most], jnp.int32)
    reply, lengths, features = [read_prompt(device, prompt)], [], []
    while len(reply) < tokens:
        drafted = np.asarray(device.run(draft_step, slots, wanted, drafting=drafting).tokens)[0]
        drafts = propose([*prompt, *reply], drafted)
        block = Drafts(jnp.asarray(drafts)[None], jnp.array([len(drafts)], jnp.int32))
        verified = device.run(verify_step, slots, block, draws=True)
        kept = keep(drafts, verified)
        device.run(commit_step, slots, verified, jnp.array([kept], jnp.int32))
        reply += [*drafts[:kept].tolist(), int(verified.tokens[0, kept])]
        lengths.append(kept + 1)
        features.append(np.asarray(verified.features[0, : kept + 1], np.float32))
    return Generation(reply[:tokens], lengths, np.concatenate(features))


def seated(opened: Opened, length: int) -> Device:
    """A device whose state has one slot, to which all pages belong."""
    models = replace(opened.models, page_size=PAGE_SIZE)
    positions = length + models.proposers[0].num_drafts + 1
    pages = -(-positions // PAGE_SIZE)
    state = empty_state(models, 1, pages + 1, pages, positions)
    device = Device(models, opened.params, state)
    zero, whole = jnp.zeros(1, jnp.int32), jnp.ones(1)
    greedy = SlotSampling(
        temperature=0 * whole, top_k=zero, top_p=whole, min_p=0 * whole, seed=jnp.zeros(1, "uint32")
    )
    all_pages = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
    admission = Admission(zero, all_pages, zero, jnp.array([length]), greedy)
    device.run(admit_step, packed_admission(admission))
    return device


def read_prompt(device: Device, prompt: list[int]) -> int:
    """Reads the prompt and returns the token after it."""
    one = lambda value: jnp.array([value], jnp.int32)
    chunk = PromptChunk(one(SLOT), jnp.array([prompt], jnp.int32), one(0), one(len(prompt)))
    return int(device.run(prefill_step, packed_chunk(chunk), draws=False).tokens[0, 0])


def main(argv: list[str] | None = None) -> Generation:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    target, drafter = map(str, jaxspec.demo_pair())
    parser.add_argument("--model", default=target, help="folder or hub id (default: demo pair)")
    parser.add_argument("--draft-model", default=drafter, help="folder or hub id of its drafter")
    parser.add_argument("--prompt", default="import os\n")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=0.0, help="nats; 0 is lossless")
    parser.add_argument("--features", help="file for the features, .npz")
    options = parser.parse_args(argv)
    opened = open_models(options.model, options.draft_model, dtype="float32")
    tokenizer = opened.tokenizer
    assert tokenizer is not None, "a checkpoint comes with its tokenizer"
    prompt = tokenizer.encode(options.prompt, add_special_tokens=True)
    rule = within(options.tolerance)
    reply = run(opened, prompt, options.max_tokens, look_back_or_drafter, rule)
    print(tokenizer.decode(reply.tokens))
    mean = np.mean(reply.acceptance_lengths)
    print(f"acceptance length {mean:.2f}, features {reply.features.shape}")
    if options.features:
        np.savez(options.features, features=reply.features, tokens=reply.tokens)
    return reply


if __name__ == "__main__":
    sys.exit(cli.run(main))
