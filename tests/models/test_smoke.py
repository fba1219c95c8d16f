import jax
import jax.numpy as jnp

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes, random_params
from jaxspec.models.qwen3 import Qwen3

DECODER = Decoder(32, 64, 2, 4, 2, 16, 1e-6, Rope(1e6), 512)


def test_shapes():
    target = Qwen3(Qwen3Config(DECODER, 100, False), (0, 1), jnp.bfloat16)
    drafter = DFlash(
        DFlashConfig(DECODER, 8, 3, (0, 1), 100, (BlockMask(False),) * 2, 50, True, True)
    )
    for model in target, drafter:
        shapes = parameter_shapes(model)
        params = random_params(model, jax.random.key(0))
        assert jax.tree.structure(params).num_leaves == len(shapes)
