"""Calls of qkv_write, and what they must give in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    slots: int = 2
    width: int = 3
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    scale_dtype: str | None = None
    """Type of the norms' scales; None for that of the pages."""
    parts: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        shape = f"{self.slots}x{self.width}-{self.kv_heads}x{self.group}-d{self.head_dim}"
        scales = f"-{self.scale_dtype} scales" if self.scale_dtype else ""
        return f"{shape}-p{self.page_size}-{self.dtype}-{self.parts} parts{scales}"


def inputs(case: Case) -> dict:
    """The inputs of a case. Every row is written to a place of its own; the other numbers of the
    pools must stay."""
    rng = np.random.default_rng(case.seed)
    rows = case.slots * case.width
    pages = 2 + rows // case.page_size
    pool = (pages, case.page_size, case.kv_heads, case.head_dim)
    places = case.page_size + rng.permutation((pages - 1) * case.page_size)[:rows]
    angle = rng.normal(size=(case.slots, case.width, case.head_dim // 2)) * 10
    fused = (case.group + 2) * case.kv_heads * case.head_dim
    numbers = lambda *shape: jnp.asarray(rng.normal(size=shape), case.dtype)
    scale = lambda: numbers(case.head_dim).astype(case.scale_dtype or case.dtype)
    return {
        "qkv": numbers(case.parts, case.slots, case.width, fused),
        "query_norm": scale() if case.group else None,
        "key_norm": scale(),
        "cos": jnp.asarray(np.cos(angle), jnp.float32),
        "sin": jnp.asarray(np.sin(angle), jnp.float32),
        "cells": jnp.asarray(places.reshape(case.slots, case.width), jnp.int32),
        "key_pages": numbers(*pool),
        "value_pages": numbers(*pool),
    }


def expected(case: Case, given: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wide = {name: np.asarray(x, np.float64) for name, x in given.items() if x is not None}
    heads = case.group * case.kv_heads
    rows = wide["qkv"].sum(0).reshape(case.slots, case.width, -1, case.head_dim)
    query, key, value = np.split(rows, [heads, heads + case.kv_heads], axis=2)
    if case.group:
        query = turned(query, wide["query_norm"], wide["cos"], wide["sin"])
    packed = query.reshape(case.slots, case.width, case.kv_heads, case.group, case.head_dim)
    key = turned(key, wide["key_norm"], wide["cos"], wide["sin"])
    pools = []
    for name, written in (("key_pages", key), ("value_pages", value)):
        pool = wide[name].copy()
        flat = pool.reshape(-1, *pool.shape[2:])
        flat[np.asarray(given["cells"]).reshape(-1)] = written.reshape(-1, *flat.shape[1:])
        pools.append(pool)
    return packed.transpose(0, 2, 1, 3, 4), *pools


def turned(x, scale, cos, sin) -> np.ndarray:
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale
    first, second = np.split(normed, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
