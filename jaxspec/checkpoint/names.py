"""The tensors of a Hugging Face checkpoint that each of our parameters is made of.

ours                      Hugging Face's
attention/qkv/kernel  =  [q_proj.weight; k_proj.weight; v_proj.weight]^T
mlp/gate_up/kernel    =  [gate_proj.weight; up_proj.weight]^T
any other kernel      =  weight^T
the rest              =  weight
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxspec.checkpoint.safetensors_folder import NUMPY_DTYPES, StoredTensor
from jaxspec.errors import LoadError
from jaxspec.layers.decoder import Decoder
from jaxspec.models.config import DFlashConfig, Qwen3Config

Shape = tuple[int, ...]
WEIGHTS = ("BF16", "F16", "F32")
IDS = ("I64", "I32")
_HELP = "check that config.json and weights are of one checkpoint"
IGNORED_ENDINGS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Tables that some checkpoints store although they can be computed from the config."""


@dataclass(frozen=True)
class Source:
    """The stored tensors that one parameter is made of."""

    tensors: dict[str, Shape]
    """Stored name and shape of each part; the parts are joined along their first axis."""
    transposed: bool = False
    """Whether the joined tensor is transposed: linear layers are stored [outputs, inputs]."""
    dtypes: tuple[str, ...] = WEIGHTS

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        parts = list(self.tensors.values())
        joined = (sum(part[0] for part in parts), *parts[0][1:])
        return joined[::-1] if self.transposed else joined


def target_sources(config: Qwen3Config) -> dict[str, Source]:
    hidden = config.decoder.hidden_size
    sources = {
        "embedding/embedding": Source({"embed_tokens.weight": (config.vocab_size, hidden)}),
        "norm/scale": Source({"norm.weight": (hidden,)}),
    }
    if not config.tie_word_embeddings:
        sources["head/kernel"] = _matrix(hidden, {"lm_head.weight": config.vocab_size})
    return sources | _layers(config.decoder)


def drafter_sources(config: DFlashConfig) -> dict[str, Source]:
    hidden, features = config.decoder.hidden_size, len(config.target_layer_ids)
    sources = {
        "feature_projection/kernel": _matrix(features * hidden, {"fc.weight": hidden}),
        "feature_norm/scale": Source({"hidden_norm.weight": (hidden,)}),
        "norm/scale": Source({"norm.weight": (hidden,)}),
    }
    head_size = config.draft_vocab_size or config.vocab_size
    if config.owns_embedding:
        shape = (config.vocab_size, hidden)
        sources["embedding/embedding"] = Source({"embed_tokens.weight": shape})
    if config.owns_head:
        sources["head/kernel"] = _matrix(hidden, {"lm_head.weight": head_size})
    if config.draft_vocab_size is not None:
        sources["target_ids"] = Source({"d2t": (head_size,)}, dtypes=IDS)
    return sources | _layers(config.decoder)


def _layers(decoder: Decoder) -> dict[str, Source]:
    return {
        f"layers_{i}/{path}": replace(
            source, tensors={f"layers.{i}.{name}": s for name, s in source.tensors.items()}
        )
        for i in range(decoder.num_layers)
        for path, source in _layer(decoder).items()
    }


def _layer(decoder: Decoder) -> dict[str, Source]:
    hidden, inner, width = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    heads, kv_heads = decoder.num_heads * width, decoder.num_kv_heads * width
    qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    return {
        "attention/norm/scale": Source({"input_layernorm.weight": (hidden,)}),
        "attention/qkv/kernel": _matrix(
            hidden, {f"self_attn.{name}.weight": size for name, size in qkv.items()}
        ),
        "attention/q_norm/scale": Source({"self_attn.q_norm.weight": (width,)}),
        "attention/k_norm/scale": Source({"self_attn.k_norm.weight": (width,)}),
        "attention/out/kernel": _matrix(heads, {"self_attn.o_proj.weight": hidden}),
        "mlp/norm/scale": Source({"post_attention_layernorm.weight": (hidden,)}),
        "mlp/gate_up/kernel": _matrix(
            hidden, {"mlp.gate_proj.weight": inner, "mlp.up_proj.weight": inner}
        ),
        "mlp/down/kernel": _matrix(inner, {"mlp.down_proj.weight": hidden}),
    }


def _matrix(inputs: int, outputs: dict[str, int]) -> Source:
    return Source({name: (size, inputs) for name, size in outputs.items()}, transposed=True)


def check_tensors(
    sources: dict[str, Source],
    stored: dict[str, StoredTensor],
    where: str,
    unused: tuple[str, ...] = (),
) -> None:
    """Raises a LoadError that names a missing, misshapen or unknown tensor. Those in `unused` may
    exist."""
    expected = {
        name: (shape, source.dtypes)
        for source in sources.values()
        for name, shape in source.tensors.items()
    }
    for name, (shape, dtypes) in expected.items():
        if name not in stored:
            raise LoadError(f"{where}: no tensor {name}, expected one {in_words(shape)}; {_HELP}")
        tensor = stored[name]
        if tensor.shape != shape:
            raise LoadError(
                f"{where}: {name} is {in_words(tensor.shape)}, expected {in_words(shape)}; {_HELP}"
            )
        if tensor.dtype not in dtypes:
            raise LoadError(
                f"{where}: {name} is {tensor.dtype}, expected {' or '.join(dtypes)}; {_HELP}"
            )
    extra = sorted(
        name
        for name in stored.keys() - expected.keys() - set(unused)
        if not name.endswith(IGNORED_ENDINGS)
    )
    if extra:
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise LoadError(
            f"{where}: unknown tensor {extra[0]}{more}, expected only those of the config; {_HELP}"
        )


def exact_dtype(sources: dict[str, Source], stored: dict[str, StoredTensor]) -> jnp.dtype:
    """The narrowest dtype that holds all these weights without rounding."""
    dtypes = {stored[name].dtype for source in sources.values() for name in source.tensors}
    return jnp.result_type(*(NUMPY_DTYPES[dtype] for dtype in dtypes))


def in_words(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
