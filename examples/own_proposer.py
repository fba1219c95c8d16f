"""A proposer of your own: who drafts is one class, and the text stays the target's.

    python examples/own_proposer.py
    python examples/own_proposer.py --model Qwen/Qwen3-0.6B --prompt "1, 2, 3, 1, 2, 3,"

`PairsOnDevice` remembers for each token which token followed it last, and drafts by following these
pairs from the current token on. It runs inside the compiled step. The program decodes with its
drafts and without, compares the tokens, and prints how many drafts were accepted. docs/methods.md
explains the methods of the class.
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec.proposers.device import Drafts
from jaxspec.proposers.methods import METHODS, Method

ENTRIES = 4096  # tokens that share an entry only cost speed


@dataclasses.dataclass(frozen=True)
class PairsOnDevice:
    """After each token, what followed it last."""

    num_drafts: int
    max_positions = None

    def new_state(self, num_slots, num_pages, page_size, positions):
        return jnp.zeros((num_slots, ENTRIES), jnp.int32), jnp.zeros(num_slots, jnp.int32)

    def absorb(self, params, state, committed):
        def add(i, state):
            (followers, newest), slots = state, committed.block.slots
            token, kept = committed.tokens[:, i], i < committed.block.counts
            entry = slots, newest[slots] % ENTRIES
            followers = followers.at[entry].set(jnp.where(kept, token, followers[entry]))
            return followers, newest.at[slots].set(jnp.where(kept, token, newest[slots]))

        return jax.lax.fori_loop(0, committed.tokens.shape[1], add, state)

    def propose(self, target, params, state, inputs, *, width, drawn):
        drafts = [inputs.tokens]
        while len(drafts) < width:
            drafts.append(state[0][inputs.slots, drafts[-1] % ENTRIES])
        return state, Drafts(jnp.stack(drafts[1:], axis=1), inputs.num_drafts)

    def bytes_read(self, params, target_head):
        return 0


METHODS["pairs on device"] = Method(device=lambda options, drafts: PairsOnDevice(drafts))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(jaxspec.demo_pair()[0]), help="folder or hub id")
    parser.add_argument("--prompt", default="import os\nimport sys\n")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=5, help="drafts per step")
    options = parser.parse_args(argv)

    # In float32, because bfloat16 rounds differently in a step of another width.
    engine = jaxspec.Engine.from_pretrained(
        options.model,
        method="pairs on device",
        num_drafts=options.drafts,
        dtype="float32",
        max_batch=1,
        max_model_len=512,
    )
    drafted = engine.generate(options.prompt, max_tokens=options.max_tokens)
    plain = engine.plain().generate(options.prompt, max_tokens=options.max_tokens)
    stats, equal = drafted.stats, drafted.token_ids == plain.token_ids

    print(options.prompt + drafted.text)
    print(f"\nequal to plain decoding: {'yes' if equal else 'NO'}")
    print(
        f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts accepted, "
        f"{stats.mean_acceptance_length:.2f} tokens per forward of the target"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
