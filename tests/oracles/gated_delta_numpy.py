"""The mixer of a linear layer of Qwen3.5 in float64, token by token and head by head.

u = conv(x Wqkv), silu            causal, per channel, over the last inputs
q, k                              l2-normed per head; q also over the root of its size
beta = sigmoid(x Wb)              g = -exp(A_log) softplus(x Wa + dt_bias)
S <- e^g S                        one matrix [key, value] per value head
S <- S + k (beta (v - k^T S))^T
y = w norm(q^T S) silu(x Wz), Wo
"""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a linear layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float

    @property
    def keys(self) -> int:
        """How many channels all keys have; all queries have as many."""
        return self.key_heads * self.key_dim


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a layer for one request."""

    inputs: np.ndarray
    """The last inputs of the convolution, one fewer than it has taps, oldest first: [tap, channel].
    They are zero for positions before the request's first token."""
    heads: np.ndarray
    """One matrix per value head: [head, key, value]."""


def sizes_of(config: dict) -> Sizes:
    return Sizes(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["rms_norm_eps"],
    )


def empty(sizes: Sizes, taps: int) -> State:
    channels = 2 * sizes.keys + sizes.value_heads * sizes.value_dim
    heads = np.zeros((sizes.value_heads, sizes.key_dim, sizes.value_dim))
    return State(np.zeros((taps - 1, channels)), heads)


def mix(
    sizes: Sizes, weights: Mapping[str, np.ndarray], rows: np.ndarray, state: State
) -> tuple[np.ndarray, list[State]]:
    """Outputs of normed rows [token, hidden], and the state after each of them.

    `weights` are the tensors under `linear_attn.` by their stored names, in float64.
    """
    outputs, states = [], []
    for row in rows:
        output, state = one_token(sizes, weights, row, state)
        outputs.append(output)
        states.append(state)
    return np.array(outputs), states


def one_token(
    sizes: Sizes, weights: Mapping[str, np.ndarray], row: np.ndarray, state: State
) -> tuple[np.ndarray, State]:
    window = np.concatenate([state.inputs, (weights["in_proj_qkv.weight"] @ row)[None]])
    taps = weights["conv1d.weight"][:, 0].T
    u = silu((window * taps).sum(axis=0))
    query, key, value = np.split(u, [sizes.keys, 2 * sizes.keys])
    query = l2_normed(query.reshape(sizes.key_heads, -1)) / np.sqrt(sizes.key_dim)
    key = l2_normed(key.reshape(sizes.key_heads, -1))
    value = value.reshape(sizes.value_heads, -1)
    beta = sigmoid(weights["in_proj_b.weight"] @ row)
    step = softplus(weights["in_proj_a.weight"] @ row + weights["dt_bias"])
    decay = np.exp(-np.exp(weights["A_log"]) * step)
    gate = (weights["in_proj_z.weight"] @ row).reshape(sizes.value_heads, -1)

    heads, attended = [], []
    for head in range(sizes.value_heads):
        own = head * sizes.key_heads // sizes.value_heads
        after = decay[head] * state.heads[head]
        missing = value[head] - key[own] @ after
        after = after + np.outer(key[own], beta[head] * missing)
        heads.append(after)
        read = query[own] @ after
        normed = read / np.sqrt(np.mean(read**2) + sizes.eps)
        attended.append(weights["norm.weight"] * normed * silu(gate[head]))
    output = weights["out_proj.weight"] @ np.concatenate(attended)
    return output, State(window[1:], np.array(heads))


def centred_norm(rows: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The norm before each sublayer, which multiplies by one plus its weight."""
    mean = np.mean(rows**2, axis=-1, keepdims=True)
    return rows / np.sqrt(mean + eps) * (1.0 + weight)


def l2_normed(heads: np.ndarray) -> np.ndarray:
    return heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True) + 1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)
