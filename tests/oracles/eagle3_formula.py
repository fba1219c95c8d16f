"""EAGLE-3 in a second implementation, in float64 numpy and without a cache: every row of a text,
and the chain of drafts after it."""

import dataclasses

import numpy as np

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Formula:
    """The weights by their published names, and the values of the config."""

    weights: Weights
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    theta: float
    eps: float
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """One vector per position, made of all its features."""
        if self.norm_before_fc:
            features = self.norm(features, "input_norm.weight")
        if self.fc_norm:
            parts = np.split(features, 3, axis=-1)
            parts = [self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            features = np.concatenate(parts, axis=-1)
        return features @ self.weights["fc.weight"].T

    def rows(self, embedded: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logits of every row, and the hidden vectors that a chain passes on."""
        x = hidden
        for i in range(self.layers):
            x = self.layer(i, x, embedded if i == 0 else None)
        final = self.norm(x, "norm.weight")
        return final @ self.weights["lm_head.weight"].T, final if self.norm_output else x

    def chain(self, features: np.ndarray, tokens: np.ndarray, count: int) -> list[np.ndarray]:
        """The logits of the drafts after `tokens`. There is one more token than positions with
        features, because the first token has no row."""
        table = self.weights["embed_tokens.weight"]
        hidden, embedded = self.fuse(features), table[tokens[1:]]
        found = []
        for _ in range(count):
            logits, passed_on = self.rows(embedded, hidden)
            found.append(logits[-1])
            hidden = np.concatenate([hidden, passed_on[-1:]])
            embedded = np.concatenate([embedded, table[[logits[-1].argmax()]]])
        return found

    def layer(self, i: int, x: np.ndarray, embedded: np.ndarray | None) -> np.ndarray:
        name = f"layers.{i}."
        if embedded is None:
            normed, stream = self.norm(x, f"{name}input_layernorm.weight"), x
        else:
            hidden = self.norm(x, f"{name}hidden_norm.weight")
            own = self.norm(embedded, f"{name}input_layernorm.weight")
            normed = np.concatenate([own, hidden], axis=-1)
            stream = hidden if self.norm_before_residual else x
        y = stream + self.attention(name, normed)
        names = ("gate", "up", "down")
        gate, up, down = (self.weights[f"{name}mlp.{one}_proj.weight"] for one in names)
        inner = self.norm(y, f"{name}post_attention_layernorm.weight")
        gated = inner @ gate.T
        return y + (gated / (1 + np.exp(-gated)) * (inner @ up.T)) @ down.T

    def attention(self, name: str, x: np.ndarray) -> np.ndarray:
        heads = lambda part, count: (
            x @ self.weights[f"{name}self_attn.{part}_proj.weight"].T
        ).reshape(len(x), count, self.head_dim)
        query, key = heads("q", self.heads), heads("k", self.kv_heads)
        value = heads("v", self.kv_heads)
        if f"{name}self_attn.q_norm.weight" in self.weights:
            query = self.norm(query, f"{name}self_attn.q_norm.weight")
            key = self.norm(key, f"{name}self_attn.k_norm.weight")
        query, key = self.rotated(query), self.rotated(key)
        group = self.heads // self.kv_heads
        key, value = (np.repeat(part, group, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(self.head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
        return mixed @ self.weights[f"{name}self_attn.o_proj.weight"].T

    def rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.head_dim // 2
        angles = np.arange(len(x))[:, None] / self.theta ** (np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        return x / size * self.weights[name]
