"""Makes sequences of tokens from text files, and the order in which a run uses them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxspec.errors import LoadError
from jaxspec.training.documents import Document, LeftOut


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences of one length, in host memory."""

    tokens: Int[np.ndarray, "sequences length"]
    first: Int[np.ndarray, " sequences"]
    """Position from which on each sequence is learned; the tokens before it are only context."""
    features: Float[np.ndarray, "sequences length features"] | None = None
    """The target's features of the tokens, if they are kept on disk."""
    labels: Int[np.ndarray, "sequences length"] | None = None
    """The token that should be drafted at every position; goes with `features`."""

    def batch_of_step(self, step: int, batch_size: int, seed: int) -> "Sequences":
        """The batch of a step. It depends on the step alone, so resuming needs no other state.

        Every epoch has its own random order; a batch may reach from one epoch into the next.
        """
        count = len(self.tokens)
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, within = np.divmod(numbers, count)
        order = {epoch: order_of_epoch(count, seed, int(epoch)) for epoch in np.unique(epochs)}
        return self.take(np.array([order[epoch][i] for epoch, i in zip(epochs, within)]))

    def take(self, indices: Int[np.ndarray, " batch"]) -> "Sequences":
        return Sequences(
            self.tokens[indices].astype(np.int32),
            self.first[indices].astype(np.int32),
            None if self.features is None else self.features[indices],
            None if self.labels is None else self.labels[indices],
        )


@functools.lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def order_of_epoch(count: int, seed: int, epoch: int) -> Int[np.ndarray, " {count}"]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def joined(*parts: Sequences) -> Sequences:
    """Joins parts whose sequences have the same length and no features."""
    tokens = np.concatenate([part.tokens for part in parts])
    return Sequences(tokens, np.concatenate([part.first for part in parts]))


def sequences_of_documents(
    documents: Sequence[Document],
    encode: Callable[[str], list[int]],
    end_token: int | None,
    length: int,
    block_size: int,
    num_ids: int,
) -> tuple[Sequences, list[LeftOut]]:
    """Concatenates all documents and cuts them into sequences; the remainder is dropped. A
    document that is no longer than a block is left out, or refused if it was named."""
    stream: list[int] = []
    left_out: list[LeftOut] = []
    end = [] if end_token is None else [end_token]
    check_ids(end, num_ids, "the end of a text")
    for path, text, named in documents:
        ids = encode(text)
        check_ids(ids, num_ids, str(path))
        if len(ids) > block_size:
            stream += [*ids, *end]
        elif named:
            raise LoadError(
                f"{path} has {len(ids)} tokens, expected more than a block ({block_size}); "
                "join it with another file or leave it out"
            )
        else:
            left_out.append(LeftOut(path, "no longer than a block"))
    return sequences_of_stream(np.array(stream, np.int32), length), left_out


def check_ids(ids: Sequence[int] | Int[np.ndarray, "..."], num_ids: int, where: str) -> None:
    """Raises a LoadError if a token has no row in the target's embedding.

    For such a token, jax would read the last row, or numbers that are not finite.
    """
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= num_ids)]
    if outside.size:
        raise LoadError(
            f"{where} has the token id {outside[0]}, but the target's embedding has {num_ids} rows "
            f"(ids 0 to {num_ids - 1}); take the tokenizer and the weights of the same model"
        )


def sequences_of_stream(stream: Int[np.ndarray, " tokens"], length: int) -> Sequences:
    if len(stream) < length:
        raise LoadError(
            f"the data has {len(stream)} tokens, expected at least one sequence of {length}; "
            "give more text or a smaller --length"
        )
    tokens = stream[: len(stream) // length * length].reshape(-1, length)
    return Sequences(tokens, np.zeros(len(tokens), np.int32))
