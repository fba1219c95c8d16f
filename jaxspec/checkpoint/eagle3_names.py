"""The tensors of an EAGLE-3 checkpoint that each of our parameters is made of.

Only the names of the first layer differ between layouts: `midlayer.` or `layers.0.`.
"""

from collections.abc import Collection
from dataclasses import replace

from jaxspec.checkpoint.eagle3_config import parallel_drafter
from jaxspec.checkpoint.names import Source, layer_sources
from jaxspec.models.eagle3_config import Eagle3Config

FIRST, MIDDLE = "layers.0.", "midlayer."
Q_NORM = "layers_0/attention/q_norm/scale"
OF_PARALLEL = "mask_hidden"
"""The learned vector of drafters that draft all tokens at once."""


def eagle3_sources(config: Eagle3Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """The source of each parameter. `stored` are the names of the tensors in the files, which show
    how the first layer is named."""
    sources = _around_layers(config) | layer_sources(config.decoder)
    qkv, hidden = "layers_0/attention/qkv/kernel", config.decoder.hidden_size
    both = {name: (size, 2 * hidden) for name, (size, _) in sources[qkv].tensors.items()}
    sources[qkv] = replace(sources[qkv], tensors=both)
    norm = Source({f"{FIRST}hidden_norm.weight": (hidden,)})
    sources["layers_0/attention/hidden_norm/scale"] = norm
    if any(name.startswith(MIDDLE) for name in stored):
        return {path: _in_the_middle(source) for path, source in sources.items()}
    return sources


def _around_layers(config: Eagle3Config) -> dict[str, Source]:
    hidden, one = config.decoder.hidden_size, config.target_hidden_size
    together = config.num_features * one
    head_size = config.draft_vocab_size or config.vocab_size
    sources = {
        "feature_projection/kernel": Source({"fc.weight": (hidden, together)}, transposed=True),
        "norm/scale": Source({"norm.weight": (hidden,)}),
    }
    if config.norm_before_fc:
        sources["features_norm/scale"] = Source({"input_norm.weight": (together,)})
    for i in range(config.num_features if config.fc_norm else 0):
        sources[f"each_norm_{i}/scale"] = Source({f"fc_norm.{i}.weight": (one,)})
    if config.owns_embedding:
        shape = (config.vocab_size, hidden)
        sources["embedding/embedding"] = Source({"embed_tokens.weight": shape})
    if config.owns_head:
        head = {"lm_head.weight": (head_size, hidden)}
        sources["head/kernel"] = Source(head, transposed=True)
    if config.draft_vocab_size is not None:
        sources["target_ids"] = Source({"d2t": (head_size,)}, dtypes=("I64", "I32"))
    return sources


def _in_the_middle(source: Source) -> Source:
    named = {
        MIDDLE + name.removeprefix(FIRST) if name.startswith(FIRST) else name: shape
        for name, shape in source.tensors.items()
    }
    return replace(source, tensors=named)


def completed(config: Eagle3Config, parameters: Collection[str]) -> Eagle3Config:
    """The config, completed from the names of the parameters that the checkpoint has."""
    whole = config.vocab_size if "target_ids" in parameters else None
    reduced = config.draft_vocab_size or whole
    return replace(
        config,
        decoder=replace(config.decoder, head_norms=Q_NORM in parameters),
        draft_vocab_size=reduced,
        owns_embedding="embedding/embedding" in parameters,
        owns_head="head/kernel" in parameters or reduced is not None,
    )


def parameters_in(stored: Collection[str], where: str) -> set[str]:
    """The optional parameters that a checkpoint has, found by the names of its tensors."""
    if OF_PARALLEL in stored:
        raise parallel_drafter(where, OF_PARALLEL)
    by_name = {
        "embed_tokens.weight": "embedding/embedding",
        "lm_head.weight": "head/kernel",
        "d2t": "target_ids",
        f"{FIRST}self_attn.q_norm.weight": Q_NORM,
        f"{MIDDLE}self_attn.q_norm.weight": Q_NORM,
    }
    return {path for name, path in by_name.items() if name in stored}
