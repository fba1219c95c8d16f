"""DSpark drafters in each of their three layouts, and what is refused by name."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import DECODER, KEPT, SPECULATORS, ZLAB, speculators_tensors, zlab_tensors

from jaxspec.checkpoint.conversion import convert
from jaxspec.checkpoint.draft_config import draft_config_of
from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.load import open_drafter
from jaxspec.errors import LoadError, UsageError
from jaxspec.models.config import ConfidenceHead, MarkovHead
from oracles import draws

HIDDEN, VOCAB, RANK = DECODER["hidden_size"], DECODER["vocab_size"], 6
HEADS = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DEEPSPEC = DECODER | HEADS | {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 3,
    "mask_token_id": 39,
    "num_anchors": 512,
    "num_target_layers": 3,
    "target_layer_ids": [0, 1],
    "tie_word_embeddings": False,
}  # fmt: skip
SPECFORGE = ZLAB | {
    "architectures": ["DSparkDraftModel"],
    "block_size": 3,
    "dflash_config": ZLAB["dflash_config"]
    | HEADS
    | {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0},
}
OF_SPECULATORS = SPECULATORS | HEADS | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "block_size": 3,
    "ce_loss_alpha": 0.1,
    "loss_decay_gamma": 4.0,
}  # fmt: skip
DIALECTS = {"DeepSpec": DEEPSPEC, "SpecForge": SPECFORGE, "speculators": OF_SPECULATORS}


def read(config: dict, block_size: int | None = None):
    return draft_config_of(Entries(config, "config.json"), Path("drafter"), block_size)


def changed(config: dict, **heads) -> dict:
    """Other settings of the heads, where this layout has them."""
    if config is not SPECFORGE:
        return config | heads
    return config | {"dflash_config": config["dflash_config"] | heads}


def head_shapes(kind: str, drafted: int) -> dict:
    shapes = {
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (drafted, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, HIDDEN + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, HIDDEN + 2 * RANK)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    return shapes


def tensors_of(dialect: str, kind: str = "vanilla") -> dict[str, np.ndarray]:
    reduced = dialect == "speculators"
    tensors = speculators_tensors() if reduced else zlab_tensors()
    shapes = head_shapes(kind, len(KEPT) if reduced else VOCAB)
    if dialect == "DeepSpec":
        shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    if reduced:
        del tensors["embed_tokens.weight"]
    return tensors | {name: draws.weight(name, shape) for name, shape in shapes.items()}


def write(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_three_layouts_say_the_same(dialect):
    config = read(DIALECTS[dialect])
    assert config.kind == "dspark" and config.anchor_first
    assert (config.rows, config.num_drafts, config.block_size) == (3, 3, 4)
    assert config.transition == MarkovHead("vanilla", RANK, candidates=16)
    assert config.confidence == ConfidenceHead(reads_token=True)
    assert config.target_layer_ids == (0, 1) and config.mask_token_id == 39


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_heads_it_is_a_dflash_drafter_whose_every_row_drafts(dialect):
    config = read(changed(DIALECTS[dialect], markov_rank=0, enable_confidence_head=False))
    assert (config.kind, config.transition, config.confidence) == ("dflash", None, None)
    assert config.anchor_first and config.num_drafts == 3


def test_speculators_say_whether_the_current_token_s_row_drafts():
    rows_after = read(OF_SPECULATORS | {"sample_from_anchor": False})
    assert not rows_after.anchor_first
    assert (rows_after.rows, rows_after.num_drafts, rows_after.block_size) == (3, 2, 3)
    assert rows_after.transition is not None
    plain = read(SPECULATORS | {"sample_from_anchor": True})
    assert (plain.kind, plain.anchor_first, plain.num_drafts) == ("dflash", True, 4)
    assert not read(SPECULATORS).anchor_first


def test_the_confidence_head_reads_the_token_unless_told_otherwise():
    alone = changed(DEEPSPEC, confidence_head_with_markov=False)
    assert read(alone).confidence == ConfidenceHead(reads_token=False)
    for dialect, reads in ("DeepSpec", True), ("SpecForge", True), ("speculators", False):
        silent = changed(DIALECTS[dialect], confidence_head_with_markov=None)
        assert read(silent).confidence == ConfidenceHead(reads)


def test_block_sizes():
    assert read(DEEPSPEC | {"block_size": 1}).num_drafts == 1
    assert read(DEEPSPEC, block_size=3).rows == 2
    assert read(OF_SPECULATORS | {"sample_from_anchor": False}, block_size=8).rows == 8


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DEEPSPEC | {"block_size": 0}, "block_size is 0, expected an integer of at least 1"),
        (OF_SPECULATORS | {"block_size": 1, "sample_from_anchor": False}, "block_size is 1"),
        (DEEPSPEC | {"target_layer_ids": [-1, 1]}, "-1 is the embedding"),
        (OF_SPECULATORS | {"aux_hidden_state_layer_ids": [0, 1]}, "0 is the embedding"),
        (changed(SPECFORGE, target_layer_ids=[-1]), "-1 is the embedding"),
        (DEEPSPEC | {"markov_head_type": "lstm"}, "vanilla or gated or rnn"),
        (changed(SPECFORGE, markov_head_type="lstm"), "markov_head_type"),
        (DEEPSPEC | {"markov_rank": -1}, "markov_rank is -1"),
        (DEEPSPEC | {"markov_rank": 0}, "confidence_head_with_markov without a Markov head"),
        (DEEPSPEC | {"enable_confidence_head": "yes"}, "enable_confidence_head"),
        (DEEPSPEC | {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (DEEPSPEC | {"mask_token_id": None}, "mask_token_id"),
        (DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, "markov_rank"),
        (changed(SPECFORGE, attention_mode="mla"), "attention_mode"),
        (changed(SPECFORGE, markov_depth=2), "markov_depth"),
        (SPECFORGE | {"markov_rank": 7}, "markov_rank is 7, but 6"),
        (OF_SPECULATORS | {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
    ],
)
def test_bad_configs(config, named):
    with pytest.raises(LoadError, match=re.escape(named)) as caught:
        read(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_tensor_has_its_place_also_after_converting(dialect, kind, tmp_path):
    config = changed(DIALECTS[dialect], markov_head_type=kind)
    tensors = tensors_of(dialect, kind)
    folder = write(tmp_path / "drafter", config, tensors)
    checkpoint = open_drafter(folder)
    assert checkpoint.config.owns_embedding == (dialect == "DeepSpec")
    assert checkpoint.config.owns_head == (dialect != "SpecForge")
    params = checkpoint.load(jnp.float32)
    head = params["transition"]
    same = np.testing.assert_array_equal
    same(head["preceding"]["embedding"], tensors["markov_head.markov_w1.weight"])
    same(head["following"]["embedding"], tensors["markov_head.markov_w2.weight"])
    same(params["confidence_head"]["kernel"], tensors["confidence_head.proj.weight"].T)
    same(params["confidence_head"]["bias"], tensors["confidence_head.proj.bias"])
    for ours, theirs in ("gate", "gate_proj"), ("joint", "joint_proj"):
        if ours in head:
            same(head[ours]["kernel"], tensors[f"markov_head.{theirs}.weight"].T)
            same(head[ours]["bias"], tensors[f"markov_head.{theirs}.bias"])
    assert ("gate" in head, "joint" in head) == (kind == "gated", kind == "rnn")
    convert(folder, tmp_path / "orbax")
    converted = open_drafter(tmp_path / "orbax")
    assert converted.config == checkpoint.config
    again = converted.load(jnp.float32)
    same(again["transition"]["following"]["embedding"], head["following"]["embedding"])
    assert len(again) == len(params)


def test_speculators_store_a_head_only_for_a_reduced_vocabulary(tmp_path):
    config = OF_SPECULATORS | {"draft_vocab_size": VOCAB}
    tensors = tensors_of("SpecForge")
    checkpoint = open_drafter(write(tmp_path, config, tensors))
    assert not checkpoint.config.owns_head and not checkpoint.config.owns_embedding
    with pytest.raises(LoadError, match="no tensor lm_head.weight"):
        open_drafter(write(tmp_path, OF_SPECULATORS, tensors))


def without(tensors: dict, *names: str) -> dict:
    return {name: x for name, x in tensors.items() if name not in names}


GOOD = tensors_of("DeepSpec")


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        (
            DEEPSPEC,
            without(GOOD, "markov_head.markov_w1.weight"),
            "no tensor markov_head.markov_w1",
        ),
        (DEEPSPEC, without(GOOD, "confidence_head.proj.bias"), "no tensor confidence_head.proj.b"),
        (DEEPSPEC | {"markov_head_type": "rnn"}, GOOD, "no tensor markov_head.joint_proj.weight"),
        (DEEPSPEC, tensors_of("DeepSpec", "gated"), "unknown tensor markov_head.gate_proj.bias"),
        (DEEPSPEC | {"markov_rank": 5}, GOOD, "markov_w1.weight is [40, 6], expected [40, 5]"),
        (
            DEEPSPEC | {"confidence_head_with_markov": False},
            GOOD,
            "confidence_head.proj.weight is [1, 22], expected [1, 16]",
        ),
        (DEEPSPEC | {"enable_confidence_head": False}, GOOD, "unknown tensor confidence_head"),
        (
            OF_SPECULATORS,
            tensors_of("speculators")
            | {"markov_head.markov_w2.weight": draws.weight("w", (40, 6))},
            "markov_w2.weight is [40, 6], expected [7, 6]",
        ),
        (DEEPSPEC, GOOD | {"layer_fusion_weights": np.ones((2, 9), "f4")}, "a DFlare drafter"),
        (DEEPSPEC, GOOD | {"prefix_gru.weight_ih_l0": np.ones((2, 9), "f4")}, "a Domino drafter"),
        (DEEPSPEC, GOOD | {"refiner_head.mix_l": np.ones((2, 9), "f4")}, "xPress drafter"),
    ],
)
def test_bad_tensors(config, tensors, named, tmp_path):
    with pytest.raises(LoadError, match=re.escape(named)) as e:
        open_drafter(write(tmp_path, config, tensors))
    assert "\n" not in str(e.value)


def test_the_smallest_block_of_a_user(tmp_path):
    folder = write(tmp_path, DEEPSPEC, GOOD)
    assert open_drafter(folder, block_size=2).config.rows == 1
    with pytest.raises(UsageError, match="block size 1"):
        open_drafter(folder, block_size=1)
