"""The layers of a hybrid model: gated attention or a gated delta rule, then an MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.layers.axes import Fused, size_of
from jaxspec.layers.decoder import MLP, Attending, Attention, BlockMask, Decoder
from jaxspec.layers.gated_delta import DeltaSizes, GatedDelta
from pallas_kernels.split_product import total_of


class GatedAttention(Attention):
    """Attention whose output is multiplied by gates, number by number. The projection computes the
    gates, too, after the values."""

    @property
    def outputs(self) -> Fused:
        g = self.geometry
        return *g.fused, g.attended

    def mix[Memory](
        self,
        projected: Float[Array, "filled width outputs"],
        attend: Attending[Memory],
        memory: Memory,
    ) -> tuple[Float[Array, "filled width attended"], Memory]:
        fused = size_of(self.geometry.fused)
        attended, memory = attend(self, projected[..., :fused], memory)
        return attended * jax.nn.sigmoid(projected[..., fused:]), memory

    def mix_parts(
        self, parts: Float[Array, "parts filled width outputs"], attend: Any, memory: Any
    ) -> tuple[Float[Array, "filled width attended"], Any]:
        return self.mix(total_of(parts, self.dtype), attend, memory)


class HybridLayer(nn.Module):
    """One layer: attention, or the recurrent mixer of these sizes, then an MLP."""

    geometry: Decoder
    delta_sizes: DeltaSizes | None
    """None if the layer attends."""
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        g, sizes = self.geometry, self.delta_sizes
        if sizes is None:
            self.attention = GatedAttention(g, BlockMask(causal=True), self.dtype)
        else:
            self.delta = GatedDelta(g, sizes, self.dtype)
        self.mlp = MLP(g, self.dtype)

    @property
    def mixer(self) -> GatedAttention | GatedDelta:
        return self.attention if self.delta_sizes is None else self.delta

    def __call__(
        self, x: Float[Array, "batch width hidden"], attend: Any, memory: Any
    ) -> tuple[Float[Array, "batch width hidden"], Any]:
        """The residual stream after the layer, and the layer's new cache. `attend` is how the mixer
        reads its memory: `Attending` or `Recurring`."""
        mixed, memory = self.mixer(x, attend, memory)
        x = x + mixed
        return x + self.mlp(x), memory
