"""The tensors of a Hugging Face checkpoint that each of our parameters is made of.

ours                      Hugging Face's
attention/qkv/kernel  =  [q_proj.weight; k_proj.weight; v_proj.weight]^T
mlp/gate_up/kernel    =  [gate_proj.weight; up_proj.weight]^T
any other kernel      =  weight^T
the rest              =  weight
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxspec.checkpoint.arranged import Arranged
from jaxspec.checkpoint.safetensors_folder import NUMPY_DTYPES, StoredTensor
from jaxspec.errors import LoadError
from jaxspec.layers.convolution import SIDES
from jaxspec.layers.decoder import Decoder
from jaxspec.models.config import DFlashConfig, MarkovHead, Qwen3Config, Selector

Shape = tuple[int, ...]
WEIGHTS = ("BF16", "F16", "F32")
IDS = ("I64", "I32")
E4M3 = "F8_E4M3"
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
    kept_as: jnp.dtype | None = None
    """The dtype of the parameter; None for the dtype that the caller asks for."""
    spread: tuple[int, ...] = ()
    """If each part is a single number: how many rows of the parameter, in one column, it fills."""
    arranged: Arranged | None = None
    """How the joined tensor is changed to become the parameter, besides transposing; None if it is
    not changed."""
    quantised: bool = False
    """Whether the joined tensor becomes two parameters, `weight` in 8 bits and its `scales`."""

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        if self.spread:
            return sum(self.spread), 1
        parts = list(self.tensors.values())
        joined = (sum(part[0] for part in parts), *parts[0][1:])
        if self.arranged is not None:
            joined = self.arranged.shape(joined)
        return joined[::-1] if self.transposed else joined


def target_sources(config: Qwen3Config) -> dict[str, Source]:
    hidden = config.decoder.hidden_size
    sources = {
        "embedding/embedding": Source({"embed_tokens.weight": (config.vocab_size, hidden)}),
        "norm/scale": Source({"norm.weight": (hidden,)}),
    }
    if not config.tie_word_embeddings:
        sources["head/kernel"] = matrix_source(hidden, {"lm_head.weight": config.vocab_size})
    return sources | layer_sources(config.decoder)


def drafter_sources(config: DFlashConfig) -> dict[str, Source]:
    hidden, features = config.decoder.hidden_size, len(config.target_layer_ids)
    sources = {
        "feature_projection/kernel": matrix_source(features * hidden, {"fc.weight": hidden}),
        "feature_norm/scale": Source({"hidden_norm.weight": (hidden,)}),
        "norm/scale": Source({"norm.weight": (hidden,)}),
    }
    head_size = config.draft_vocab_size or config.vocab_size
    if config.owns_embedding:
        shape = (config.vocab_size, hidden)
        sources["embedding/embedding"] = Source({"embed_tokens.weight": shape})
    if config.owns_head:
        sources["head/kernel"] = matrix_source(hidden, {"lm_head.weight": head_size})
    if config.draft_vocab_size is not None:
        sources["target_ids"] = Source({"d2t": (head_size,)}, dtypes=IDS)
    sources |= _dspark(config, head_size) | _selector(config)
    return sources | layer_sources(config.decoder, _convolutions(config))


def _dspark(config: DFlashConfig, head_size: int) -> dict[str, Source]:
    """The Markov head and the confidence head, if the drafter has them."""
    hidden, head, sources = config.decoder.hidden_size, config.transition, {}
    rank = 0 if head is None else head.rank
    if isinstance(head, MarkovHead):
        codebook = lambda name, vocab: Source({f"markov_head.{name}.weight": (vocab, rank)})
        sources["transition/preceding/embedding"] = codebook("markov_w1", config.vocab_size)
        sources["transition/following/embedding"] = codebook("markov_w2", head_size)
        if head.kind == "gated":
            gate = "markov_head.gate_proj", hidden + rank, rank
            sources |= _with_bias("transition/gate", *gate)
        if head.kind == "rnn":
            joint = "markov_head.joint_proj", hidden + 2 * rank, 3 * rank
            sources |= _with_bias("transition/joint", *joint)
    if config.confidence is not None:
        inputs = hidden + rank * config.confidence.reads_token
        sources |= _with_bias("confidence_head", "confidence_head.proj", inputs, 1)
    return sources


def _with_bias(path: str, name: str, inputs: int, outputs: int) -> dict[str, Source]:
    return {
        f"{path}/kernel": matrix_source(inputs, {f"{name}.weight": outputs}),
        f"{path}/bias": Source({f"{name}.bias": (outputs,)}),
    }


def _convolutions(config: DFlashConfig) -> dict[str, Source]:
    """The convolutions of one layer."""
    sizes, hidden = config.convolutions, config.decoder.hidden_size
    if sizes is None:
        return {}
    changes = SIDES * sizes.taps * (hidden // sizes.group_size)
    return {
        f"{sublayer}_convolution/{path}": source
        for sublayer in ("attention", "mlp")
        for path, source in {
            "base": Source({f"{sublayer}_conv.base_kernel": (SIDES, sizes.taps, hidden)}),
            "projection/kernel": matrix_source(
                hidden, {f"{sublayer}_conv.kernel_projection.weight": changes}
            ),
        }.items()
    }


def _selector(config: DFlashConfig) -> dict[str, Source]:
    if not isinstance(config.transition, Selector):
        return {}
    rank, stored = config.transition.rank, "candidate_selector"
    codebook = lambda name: Source({f"{stored}.{name}": (config.vocab_size, rank)})
    return {
        "transition/preceding/embedding": codebook("predecessor_codebook"),
        "transition/following/embedding": codebook("successor_codebook"),
        "transition/projection/kernel": matrix_source(
            config.decoder.hidden_size, {f"{stored}.hidden_projection.weight": rank}
        ),
    }


def layer_sources(decoder: Decoder, added: dict[str, Source] | None = None) -> dict[str, Source]:
    """The layers of a decoder, by the names that all layouts use. `added` is what each layer has in
    addition."""
    layer = _layer(decoder) | (added or {})
    layers = (layer_of(i, layer) for i in range(decoder.num_layers))
    return {path: source for one in layers for path, source in one.items()}


def layer_of(index: int, layer: dict[str, Source]) -> dict[str, Source]:
    """The same sources, with the paths and names of the layer that has this index."""
    return {
        f"layers_{index}/{path}": replace(
            source, tensors={f"layers.{index}.{name}": s for name, s in source.tensors.items()}
        )
        for path, source in layer.items()
    }


def _layer(decoder: Decoder) -> dict[str, Source]:
    hidden, width = decoder.hidden_size, decoder.head_dim
    heads, kv_heads = decoder.num_heads * width, decoder.num_kv_heads * width
    qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    norms = {
        "attention/q_norm/scale": Source({"self_attn.q_norm.weight": (width,)}),
        "attention/k_norm/scale": Source({"self_attn.k_norm.weight": (width,)}),
    }
    return {
        "attention/norm/scale": Source({"input_layernorm.weight": (hidden,)}),
        "attention/qkv/kernel": matrix_source(
            hidden, {f"self_attn.{name}.weight": size for name, size in qkv.items()}
        ),
        **(norms if decoder.head_norms else {}),
        "attention/out/kernel": matrix_source(heads, {"self_attn.o_proj.weight": hidden}),
        "mlp/norm/scale": Source({"post_attention_layernorm.weight": (hidden,)}),
        **mlp_matrices(decoder),
    }


def mlp_matrices(decoder: Decoder) -> dict[str, Source]:
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    return {
        "mlp/gate_up/kernel": matrix_source(
            hidden, {"mlp.gate_proj.weight": inner, "mlp.up_proj.weight": inner}
        ),
        "mlp/down/kernel": matrix_source(inner, {"mlp.down_proj.weight": hidden}),
    }


def matrix_source(inputs: int, outputs: dict[str, int]) -> Source:
    return Source({name: (size, inputs) for name, size in outputs.items()}, transposed=True)


def check_tensors(
    sources: dict[str, Source],
    stored: dict[str, StoredTensor],
    where: str,
    unused: tuple[str, ...] = (),
) -> None:
    """Raises a LoadError that names a missing, misshapen or unknown tensor. Tensors in `unused` may
    exist, too, but no parameter is made of them."""
    expected = {
        name: (shape, source.dtypes)
        for source in sources.values()
        for name, shape in source.tensors.items()
    }
    for name, (shape, dtypes) in expected.items():
        if name not in stored:
            raise LoadError(f"{where}: no tensor {name}, expected one {in_words(shape)}; {_HELP}")
        tensor = stored[name]
        if tensor.dtype == E4M3 and E4M3 not in dtypes:
            raise LoadError(
                f"{where}: {name} is {E4M3}, expected {' or '.join(dtypes)}; of 8-bit weights only "
                "projections of a target's layers are read, if quantization_config in config.json "
                "says how they are scaled"
            )
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
    """The narrowest dtype that holds all these weights without rounding. Weights that keep a dtype
    of their own do not count."""
    rounded = [source for source in sources.values() if source.kept_as is None]
    dtypes = {stored[name].dtype for source in rounded for name in source.tensors}
    return jnp.result_type(*(NUMPY_DTYPES[dtype] for dtype in dtypes))


def in_words(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
