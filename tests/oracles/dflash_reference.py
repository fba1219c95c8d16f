"""The DFlash drafter by its formula, in float64 or in the type of the given weights. Everything is
recomputed for every block.

c = norm(W_fc f)                        context, once for all layers
h = embedded block
per layer, x = norm(h):
  q       = rope(norm(x W_q))           block rows only
  k, v    = rope(norm([c ; x] W_k)), [c ; x] W_v
  h       = h + softmax(q k^T / sqrt(head_dim) + mask) v W_o
  h       = h + swiglu(norm(h))
hidden = norm(h)
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oracles import draws
from oracles.dflash_cases import block_starts

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where the weights come from, and the type of the computation."""

    of_name: Callable[[str, tuple[int, ...]], np.ndarray] = draws.weight
    prefix: str = ""
    """Put before every name, so that a drafter's weights differ from its target's."""
    dtype: torch.dtype = torch.float64

    def __call__(self, name: str, *shape: int) -> Tensor:
        return torch.from_numpy(self.of_name(f"{self.prefix}{name}.weight", shape)).to(self.dtype)

    @property
    def wide(self) -> torch.dtype:
        """The type for norms, rotations and softmax: at least float32, as in transformers."""
        return torch.promote_types(self.dtype, torch.float32)


def run_drafter(case: dict) -> dict[str, np.ndarray]:
    """The hidden states, keys and values of each block, and the keys and values of the context."""
    config, starts = case["config"], block_starts(case)
    features = _double(draws.features("features", (starts[-1], feature_width(config))))
    outputs = {"hidden": [], "block_keys": [], "block_values": []}
    for start in starts:
        shape = (config["block_size"], config["hidden_size"])
        block = _double(draws.features(f"block at {start}", shape))
        hidden, keys, values = forward(config, case["masks"], features[:start], block)
        outputs["hidden"].append(hidden)
        outputs["block_keys"].append(keys[:, start:])
        outputs["block_values"].append(values[:, start:])
    stacked = {name: torch.stack(blocks) for name, blocks in outputs.items()}
    stacked |= {"context_keys": keys[:, :start], "context_values": values[:, :start]}
    return {name: tensor.float().numpy() for name, tensor in stacked.items()}


def feature_width(config: dict) -> int:
    return config["hidden_size"] * len(config["dflash_config"]["target_layer_ids"])


def forward(
    config: dict,
    masks: list[tuple[bool, int | None]],
    features: Tensor,
    block: Tensor,
    weights: Weights = Weights(),
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    inner = config["intermediate_size"]
    start, width = len(features), len(block)

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return weights(name, rows, columns)

    def norm(name: str, x: Tensor) -> Tensor:
        wide = x.to(weights.wide)
        wide = wide / (wide.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
        return wide.to(x.dtype) * weights(name, x.shape[-1])

    turns = rotations(config, start + width)
    context = norm("hidden_norm", features @ matrix("fc", hidden, features.shape[1]).T)
    all_keys, all_values = [], []
    for i, (causal, window) in enumerate(masks):
        at = f"layers.{i}.self_attn"
        x = norm(f"layers.{i}.input_layernorm", block)
        both = torch.cat([context, x])
        query = (x @ matrix(f"{at}.q_proj", heads * head_dim, hidden).T).view(width, heads, -1)
        keys = (both @ matrix(f"{at}.k_proj", kv_heads * head_dim, hidden).T).view(
            start + width, kv_heads, head_dim
        )
        values = (both @ matrix(f"{at}.v_proj", kv_heads * head_dim, hidden).T).view_as(keys)
        query = rotate(norm(f"{at}.q_norm", query), turns[start:])
        keys = rotate(norm(f"{at}.k_norm", keys), turns)
        attended = attend(query, keys, values, allowed(start, width, causal, window))
        block = block + attended @ matrix(f"{at}.o_proj", hidden, heads * head_dim).T
        x = norm(f"layers.{i}.post_attention_layernorm", block)
        gate = x @ matrix(f"layers.{i}.mlp.gate_proj", inner, hidden).T
        up = x @ matrix(f"layers.{i}.mlp.up_proj", inner, hidden).T
        block = block + (F.silu(gate) * up) @ matrix(f"layers.{i}.mlp.down_proj", hidden, inner).T
        all_keys.append(keys)
        all_values.append(values)
    return norm("norm", block), torch.stack(all_keys), torch.stack(all_values)


def allowed(start: int, width: int, causal: bool, window: int | None) -> Tensor:
    """Which positions each block row may see, decided one pair at a time."""

    def sees(row: int, position: int) -> bool:
        if causal and position > row:
            return False
        return window is None or abs(row - position) < window

    rows = range(start, start + width)
    return torch.tensor([[sees(row, p) for p in range(start + width)] for row in rows])


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention, computed head by head."""
    group = query.shape[1] // keys.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ keys[:, head // group].T / query.shape[2] ** 0.5
        wide = torch.promote_types(scores.dtype, torch.float32)
        seen = scores.to(wide).masked_fill(~mask, -torch.inf).softmax(-1).to(scores.dtype)
        heads.append(seen @ values[:, head // group])
    return torch.cat(heads, dim=-1)


def rotations(config: dict, count: int) -> Tensor:
    """For every position, the complex numbers that rotate the pairs (i, i + head_dim / 2)."""
    if config.get("rope_scaling"):
        read = Qwen3Config(**{key: config[key] for key in ROPE_KEYS})
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](read, device="cpu")
    else:
        exponents = torch.arange(0, config["head_dim"], 2).double() / config["head_dim"]
        frequencies, magnitude = config["rope_theta"] ** -exponents, 1.0
    angles = torch.arange(count).double()[:, None] * frequencies.double()
    return torch.polar(torch.full_like(angles, magnitude), angles)


ROPE_KEYS = (
    "rope_theta", "rope_scaling", "head_dim", "hidden_size", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    turned = torch.complex(first, second) * turns[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def _double(drawn: np.ndarray) -> Tensor:
    return torch.from_numpy(drawn).double()
