"""EAGLE-3 checkpoints: three layouts at published sizes; what is wrong is refused by name."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import BF16, TARGET, ZLAB, target_tensors, write, zlab_tensors

from jaxspec import convert
from jaxspec.checkpoint.drafter_config import is_drafter
from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.load import open_drafter, open_target, sources_of
from jaxspec.checkpoint.pair import check_pair, fitted
from jaxspec.engine.setup.load_models import open_models
from jaxspec.errors import LoadError, UsageError
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.eagle3_config import Eagle3Config, default_layer_ids
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.presets import qwen3
from oracles import eagle3_folders
from oracles.eagle3_folders import DEEPSPEC, KEPT, SPECFORGE, SPECULATORS, tensors

MIDLAYER = dict(first="midlayer")
LAYOUTS = {
    "specforge": (SPECFORGE, MIDLAYER),
    "speculators": (SPECULATORS, dict(own_table=True)),
    "speculators, every norm": (
        SPECULATORS | {"fc_norm": True, "norm_output": True},
        dict(own_table=True, head_norms=True),
    ),
    "deepspec": (DEEPSPEC, dict(features=5, head_norms=True, own_table=True)),
}


def folder_of(path, config, change=lambda held: None, **options):
    held = tensors(config, **options)
    change(held)
    return write(path, config, held)


def refused(folder, *named, load=open_drafter):
    with pytest.raises(LoadError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for name in named:
        assert name in message, message


class TestLayouts:
    def test_specforge(self, tmp_path):
        config = open_drafter(folder_of(tmp_path, SPECFORGE, **MIDLAYER)).config
        assert isinstance(config, Eagle3Config)
        assert config.target_layer_ids == (0, 1, 2) and config.num_drafts == 5
        assert not config.norm_before_residual and not config.norm_output
        assert not config.decoder.head_norms and not config.owns_embedding and config.owns_head
        assert config.draft_vocab_size == len(KEPT)

    def test_speculators(self, tmp_path):
        config = open_drafter(folder_of(tmp_path / "draft", SPECULATORS, own_table=True)).config
        assert isinstance(config, Eagle3Config)
        assert config.target_layer_ids == (0, 1, 2) and config.num_drafts == 3
        assert config.norm_before_residual and config.owns_embedding and config.owns_head
        assert open_drafter(tmp_path / "draft", block_size=9).config.num_drafts == 8

    def test_deepspec(self, tmp_path):
        options = LAYOUTS["deepspec"][1]
        config = open_drafter(folder_of(tmp_path, DEEPSPEC, **options)).config
        assert isinstance(config, Eagle3Config)
        assert config.target_layer_ids == (0, 1, 2, 3, 4) and config.num_drafts == 7
        assert config.decoder.head_norms and config.num_target_layers == 6
        assert config.draft_vocab_size is None

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_parameters_are_the_model_s_and_its_tensors(self, tmp_path, layout):
        config, options = LAYOUTS[layout]
        checkpoint = open_drafter(folder_of(tmp_path, config, **options))
        params = checkpoint.load(jnp.float32)
        shapes = parameter_shapes(Eagle3(checkpoint.config))
        flat = {path: leaf.shape for path, leaf in leaves(params)}
        assert flat == {path: shape.shape for path, shape in shapes.items()}
        held = tensors(config, **options)
        first = options.get("first", "layers.0")
        qkv = [held[f"{first}.self_attn.{name}_proj.weight"] for name in "qkv"]
        qkv = np.concatenate(qkv).T
        np.testing.assert_array_equal(params["layers_0"]["attention"]["qkv"]["kernel"], qkv)
        if "d2t" in held:
            np.testing.assert_array_equal(params["target_ids"], KEPT)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
    def test_convert_gives_the_same(self, tmp_path, layout, dtype):
        config, options = LAYOUTS[layout]
        held = {
            name: one.astype(dtype) if one.dtype == np.float32 else one
            for name, one in tensors(config, **options).items()
        }
        source = write(tmp_path / "source", config, held)
        assert convert.main([str(source), str(tmp_path / "orbax")]) == 0
        found, expected = open_drafter(tmp_path / "orbax"), open_drafter(source)
        assert found.config == expected.config
        for one, other in zip(leaves(found.load(dtype)), leaves(expected.load(dtype))):
            assert (
                one[0] == other[0]
                and np.asarray(one[1]).tobytes() == np.asarray(other[1]).tobytes()
            )

    def test_other_drafters_and_targets_are_told_apart(self):
        told = lambda config: is_drafter(Entries(config, "config.json"))
        assert all(map(told, (SPECFORGE, SPECULATORS, DEEPSPEC, ZLAB)))
        assert told({"architectures": ["Eagle3LlamaForCausalLM"]}) and not told(TARGET)


def leaves(params: dict, path: str = "") -> list:
    found = []
    for name in sorted(params):
        below = f"{path}/{name}" if path else name
        one = params[name]
        found += leaves(one, below) if isinstance(one, dict) else [(below, one)]
    return found


PUBLISHED = {"4B": ("qwen3-4b", 2560, 9728), "8B": ("qwen3-8b", 4096, 12288)}
NUMBERS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def published(size: str, layout: str) -> tuple[dict, dict]:
    """A config and the header of its weights, as the tables of the layouts have them."""
    _, hidden, inner = PUBLISHED[size]
    base, options = LAYOUTS[layout]
    numbers = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 151936} | NUMBERS
    config = json.loads(json.dumps(base))
    config.get("transformer_layer_config", config).update(numbers)
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = 32000
    for entries, key in (
        (config, "eagle_config"),
        (config, "eagle_aux_hidden_state_layer_ids"),
    ):
        entries.pop(key, None)
    if layout == "deepspec":
        config |= {"target_layer_ids": [1, 9, 17, 25, 33], "num_target_layers": 36}
    return config, eagle3_folders.shapes(config, **options)


def header_only(path, config: dict, shapes: dict, dtypes: dict | None = None):
    """A folder whose weights are a hole in a file: only what opening reads is there."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    header, end, vocab = {}, 0, 151936
    if config.get("draft_vocab_size"):
        shapes = shapes | {"d2t": (32000,), "t2d": (vocab,)}
    kinds = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)} | (dtypes or {})
    for name, shape in shapes.items():
        kind, size = kinds.get(name, ("BF16", 2))
        begin, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if "t2d" in header:  # the ids are read when a folder is opened: every id below 32000
            file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
            file.write(b"\1" * 32000)
        file.truncate(8 + len(text) + end)
    return path


class TestPublishedSizes:
    @pytest.mark.parametrize("size", PUBLISHED)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_opens_and_fits_its_target(self, tmp_path, size, layout):
        config, shapes = published(size, layout)
        drafter = open_drafter(header_only(tmp_path / "draft", config, shapes))
        target = qwen3(PUBLISHED[size][0])
        one = fitted(target, drafter.config)
        features = (1, 9, 17, 25, 33) if layout == "deepspec" else (1, 17, 32)
        assert one.target_layer_ids == features
        assert {path: s.shape for path, s in sources_of(one, shapes).items()} == {
            path: s.shape for path, s in parameter_shapes(Eagle3(one)).items()
        }
        assert drafter.num_bytes >= 2 * sum(map(math.prod, shapes.values()))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_missing_or_an_extra_tensor(self, tmp_path, layout):
        config, shapes = published("4B", layout)
        for i, name in enumerate(shapes):
            if name in ("embed_tokens.weight",) or "q_norm" in name:
                continue  # these are the drafter's own choice, and another test
            if name == "lm_head.weight" and "draft_vocab_size" not in config:
                continue
            left = {one: shape for one, shape in shapes.items() if one != name}
            refused(header_only(tmp_path / str(i), config, left), f"no tensor {name}")
        more = shapes | {"layers.7.mlp.up_proj.weight": (2, 2)}
        refused(header_only(tmp_path / "more", config, more), "unknown tensor layers.7")

    def test_head_norms_come_in_pairs(self, tmp_path):
        config, shapes = published("4B", "deepspec")
        for name in ("q_norm", "k_norm"):
            whole = f"layers.0.self_attn.{name}.weight"
            left = {one: shape for one, shape in shapes.items() if one != whole}
            refused(header_only(tmp_path / name, config, left), "_norm.weight")


def test_a_drafter_without_embedding_and_head_uses_the_target_s(tmp_path):
    config = DEEPSPEC | {"tie_word_embeddings": True}
    both = dict(features=5, head_norms=True, own_table=True)
    no_head = lambda held: held.pop("lm_head.weight")
    tied = open_drafter(folder_of(tmp_path / "tied", config, no_head, **both)).config
    assert tied.head_is_embedding and not tied.owns_head
    untied = open_drafter(folder_of(tmp_path / "untied", DEEPSPEC, no_head, **both)).config
    assert not untied.head_is_embedding and not untied.owns_head
    whole = open_drafter(folder_of(tmp_path / "whole", config, **both)).config
    assert whole.owns_head and not whole.head_is_embedding, "a stored head is never tied"
    reduced = SPECFORGE | {"tie_word_embeddings": True}
    small = open_drafter(folder_of(tmp_path / "reduced", reduced, **MIDLAYER)).config
    assert small.owns_head and not small.head_is_embedding


WRONG = {
    "peagle by architecture": ({"architectures": ["PEagleSpeculator"]}, "P-EAGLE"),
    "peagle by type": ({"speculators_model_type": "peagle"}, "P-EAGLE"),
    "peagle by key": ({"parallel_drafting": True}, "parallel_drafting"),
    "an older EAGLE": (
        {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"},
        "another version",
    ),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "fc_norm is true"),
    "an unsaid norm": ({"norm_before_residual": None}, "norm_before_residual"),
    "the embedding as a layer": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "1 or more"),
    "layers named twice": ({"target_layer_ids": [0, 1, 2]}, "both name the target's layers"),
    "no layers": ({"eagle_aux_hidden_state_layer_ids": []}, "a list of integers"),
    "width of features": ({"target_hidden_size": 24}, "fc.weight"),
    "number of features": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight"),
    "too large a vocabulary": ({"draft_vocab_size": 41}, "draft_vocab_size is 41"),
    "another vocabulary": ({"draft_vocab_size": 8}, "lm_head.weight"),
    "too many drafts": (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 1000}]}},
        "speculative_tokens is 1000",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path, what):
    change, named = WRONG[what]
    held = tensors(SPECULATORS, own_table=True)
    refused(write(tmp_path, SPECULATORS | change, held), named)


DECODERS = {
    "a sliding window": ({"use_sliding_window": True}, "use_sliding_window"),
    "sliding layers": ({"layer_types": ["sliding_attention"]}, "layer_types"),
    "another model": ({"model_type": "gpt_oss"}, "model_type"),
    "a bias": ({"attention_bias": True}, "attention_bias"),
    "no theta": ({"rope_theta": None}, "rope_theta"),
    "another head of the chain": ({"norm_output": False}, "norm_output"),
    "an unknown key": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    "another unknown key": ({"eagle_config": {"tree": 3}}, "tree"),
}


@pytest.mark.parametrize("what", DECODERS)
def test_a_decoder_that_computes_something_else(tmp_path, what):
    change, named = DECODERS[what]
    refused(write(tmp_path, SPECFORGE | change, tensors(SPECFORGE, **MIDLAYER)), named)


def test_tensors_that_say_it_is_another_drafter(tmp_path):
    def mask(held):
        held["mask_hidden"] = np.zeros((1, 1, 48), np.float32)

    refused(folder_of(tmp_path, SPECULATORS, mask, own_table=True), "P-EAGLE", "mask_hidden")


@pytest.mark.parametrize("name", ["d2t", "t2d", "lm_head.weight"])
def test_a_reduced_vocabulary_needs_its_tensors(tmp_path, name):
    gone = lambda held: held.pop(name)
    folder = folder_of(tmp_path, SPECFORGE, gone, **MIDLAYER)
    if name == "t2d":  # it says nothing that d2t does not
        assert open_drafter(folder).config.draft_vocab_size == len(KEPT)
    else:
        refused(folder, f"no tensor {name}")


def test_ids_of_the_reduced_vocabulary_are_checked(tmp_path):
    def twice(held):
        held["d2t"] = np.zeros_like(held["d2t"]) - np.arange(len(KEPT))

    refused(folder_of(tmp_path / "a", SPECFORGE, twice, **MIDLAYER), "d2t leads to ids")

    def other(held):
        held["t2d"] = ~held["t2d"]

    refused(folder_of(tmp_path / "b", SPECFORGE, other, **MIDLAYER), "t2d and d2t")


class TestPair:
    def test_layers_by_default_follow_the_depth(self, tmp_path):
        config = {k: v for k, v in SPECFORGE.items() if k != "eagle_config"}
        drafter = open_drafter(folder_of(tmp_path, config, **MIDLAYER)).config
        assert drafter.target_layer_ids == () and drafter.num_features == 3
        assert default_layer_ids(36) == (1, 17, 32) and default_layer_ids(64) == (1, 31, 60)
        with pytest.raises(LoadError, match="target layer ids"):
            fitted(self.target(3), drafter)
        assert fitted(self.target(8), drafter).target_layer_ids == (1, 3, 4)

    def target(self, layers: int):
        one = qwen3("qwen3-8b")
        decoder = dataclasses.replace(one.decoder, hidden_size=16, num_layers=layers)
        return dataclasses.replace(one, decoder=decoder, vocab_size=40)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"target_layer_ids": (0, 1, 3)}, "include the last layer"),
            ({"target_layer_ids": (0, 1, 4)}, "reach outside"),
            ({"target_layer_ids": (2, 1, 0)}, "not in order"),
            ({"vocab_size": 41}, "vocab_size is 41"),
            ({"target_hidden_size": 24}, "hidden_size is 24"),
            ({"num_target_layers": 9}, "target of 9 layers"),
        ],
    )
    def test_misfits(self, tmp_path, change, named):
        drafter = open_drafter(folder_of(tmp_path, SPECFORGE, **MIDLAYER)).config
        check_pair(self.target(4), drafter)
        with pytest.raises(LoadError, match=named):
            check_pair(self.target(4), dataclasses.replace(drafter, **change))

    def test_a_narrower_drafter_needs_an_embedding_of_its_own(self, tmp_path):
        config = SPECULATORS | {"target_hidden_size": 24}
        target = self.target(4)
        decoder = dataclasses.replace(target.decoder, hidden_size=24)
        target = dataclasses.replace(target, decoder=decoder)
        check_pair(target, open_drafter(folder_of(tmp_path / "a", config, own_table=True)).config)
        with pytest.raises(LoadError, match="hidden_size is 16"):
            check_pair(target, open_drafter(folder_of(tmp_path / "b", config)).config)


def test_methods_follow_the_kind(tmp_path):
    decoder = TARGET | {"num_hidden_layers": 5}
    target = write(tmp_path / "target", decoder, target_tensors(decoder))
    draft = folder_of(tmp_path / "draft", SPECFORGE, **MIDLAYER)
    opened = open_models(target, draft, dtype="float32")
    assert type(opened.drafter) is Eagle3 and "Eagle3" in repr(opened)
    assert opened.target.capture == (0, 1, 2)
    with pytest.raises(UsageError, match="kind 'eagle3'; expected 'eagle3'"):
        open_models(target, draft, dtype="float32", method="dflash")
    dflash = write(tmp_path / "dflash", ZLAB | {"num_target_layers": 5}, zlab_tensors())
    with pytest.raises(UsageError, match="kind 'dflash'; expected 'dflash'"):
        open_models(target, dflash, dtype="float32", method="eagle3")
    with pytest.raises(LoadError):
        open_target(draft)
