"""Random numbers that every machine can draw again from a name, so that no weights are stored.

Only the raw bits of PCG64 are used, because numpy promises not to change those. It does not promise
that for its distributions.
"""

import math
import zlib

import numpy as np


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Doubles in [-1, 1)."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return (bits >> 11).reshape(shape) * 2.0**-52 - 1.0


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a checkpoint in Hugging Face layout, by its name.

    Norm weights are near one but not too near, so that a norm that is left out or misplaced is
    noticed. Matrices do not change the size of what they multiply.
    """
    drawn = uniform(name, shape)
    if len(shape) == 1:
        drawn = 1.0 + 0.4 * np.sign(drawn) * (0.25 + 0.75 * np.abs(drawn))
    elif "embed_tokens" not in name:
        drawn = drawn * math.sqrt(3.0 / shape[1])
    return drawn.astype(np.float32)


def tokens(name: str, count: int, vocab_size: int) -> np.ndarray:
    """Token ids."""
    return ((uniform(name, (count,)) + 1.0) / 2.0 * vocab_size).astype(np.int32)


def features(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 rows with numbers as large as in a residual stream, a few times one."""
    return (4.0 * uniform(name, shape)).astype(np.float32)
