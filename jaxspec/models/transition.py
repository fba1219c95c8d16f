"""What a drafter needs for the walk over its drafted places (`jaxspec.proposers.walk`).

A pass over the block gives every drafted place its hidden state and logits, independently of the
tokens at the other places. A transition makes the places depend on each other: at each place it
adds to the logit of token b

    <query(state, token before, hidden state of the place), key(b)>

The keys are the rows of a codebook over the drafter's vocabulary.
"""

from typing import Any, Protocol

from jaxtyping import Array, Float, Int

State = Any
"""What a transition remembers of earlier places: a pytree of arrays, or None."""


class Transition(Protocol):
    """A module that belongs to a drafter's module, as its attribute `transition`.

    Its codebooks are submodules: `preceding` over the target's vocabulary, of which a place reads
    one row, and `following` over the drafter's, whose rows are the keys.
    """

    def start(self, batch: int) -> State:
        """The state before the first drafted place."""
        ...

    def read(
        self, hidden: Float[Array, "batch drafts hidden"]
    ) -> Float[Array, "batch drafts inputs"]:
        """What queries need of the hidden states, for all places at once. Products that do not
        depend on the chosen tokens are computed here instead of place by place."""
        ...

    def query(
        self, state: State, previous: Int[Array, " batch"], read: Float[Array, "batch inputs"]
    ) -> tuple[State, Float[Array, "batch rank"]]:
        """The state after a place, and the place's query. `read` is what the method `read` returned
        for the place. `previous` are token ids of the target's vocabulary."""
        ...

    def keys(self, tokens: Int[Array, "*tokens"] | None) -> Float[Array, "*tokens rank"]:
        """The keys of these token ids of the drafter's vocabulary; None stands for all of them."""
        ...
