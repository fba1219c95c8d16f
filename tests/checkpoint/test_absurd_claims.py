"""Configs, indexes and tokenizer files that promise what cannot be: refused in a line, at once.

Nothing of the promised size is built before it is known to be true, so these tests are fast: an
attempt would take minutes, or all memory.
"""

import json

import numpy as np
import pytest
from tiny_checkpoints import (
    SPECULATORS,
    TARGET,
    ZLAB,
    speculators_tensors,
    target_tensors,
    write,
    write_index,
    zlab_tensors,
)

from jaxspec.checkpoint.hub import local_folder
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.errors import LoadError
from jaxspec.text.tokenizer_files import read_text_config

ABSURD = [10**8, 2**31, 10**18, 10**400, 0, -1, -(10**400), 1.5, True, "8", [], {}, [[]]]
SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
]
FLOATS = ["rms_norm_eps", "rope_theta"]
NO_FLOATS = [10**400, 1e39, 1e-40, 0, -1.0, float("nan"), float("inf"), True, "1", [1.0]]


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, message
    return message


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, target_tensors())


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return write(tmp_path_factory.mktemp("drafter"), ZLAB, zlab_tensors())


def with_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_the_files_do_not_have(target, key, value):
    with pytest.raises(LoadError) as caught:
        open_target(with_config(target, TARGET | {key: value}))
    named = {"head_dim", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"}
    shown_by_a_tensor = value == 10**8 and key in named | {"num_key_value_heads"}
    assert key in one_line(caught) or shown_by_a_tensor


@pytest.mark.parametrize("value", [*ABSURD[4:], 2**31, 10**400], ids=lambda v: str(v)[:8])
def test_positions_that_no_integer_counts(target, value):
    with pytest.raises(LoadError, match="max_position_embeddings is") as caught:
        open_target(with_config(target, TARGET | {"max_position_embeddings": value}))
    one_line(caught)


@pytest.mark.parametrize("value", NO_FLOATS, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("key", FLOATS)
def test_a_number_that_no_float_holds(target, key, value):
    with pytest.raises(LoadError, match=f"{key} is .*positive number") as caught:
        open_target(with_config(target, TARGET | {key: value}))
    one_line(caught)


@pytest.mark.parametrize(
    ("yarn", "named"),
    [
        ({"factor": 10**400}, "factor is"),
        ({"factor": 4, "beta_fast": 1e-300}, "beta_fast is"),
        ({"factor": 4, "original_max_position_embeddings": 10**18}, "original_max_position"),
        ({"factor": 4, "rope_theta": 1.0}, "rope_theta is 1.0, expected more than 1"),
    ],
)
def test_numbers_of_yarn(target, yarn, named):
    config = {key: value for key, value in TARGET.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e6} | yarn
    with pytest.raises(LoadError, match=named) as caught:
        open_target(with_config(target, config))
    one_line(caught)


@pytest.mark.parametrize("value", [-1, [1, -1], 10**400, 2**40, [2**40], True, "7", [True], {}])
def test_end_ids_are_ids(target, value):
    with pytest.raises(LoadError, match="eos_token_id is") as caught:
        open_target(with_config(target, TARGET | {"eos_token_id": value}))
    one_line(caught)


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("key", ["num_hidden_layers", "block_size", "mask_token_id"])
def test_claims_of_a_drafter(target, drafter, key, value):
    if key == "block_size" and value == 10**8:
        return  # a matter of the context: see the plan's tests
    config = ZLAB | ({"dflash_config": {"target_layer_ids": [0, 1]}} if "mask" in key else {})
    with pytest.raises(LoadError, match=key) as caught:
        opened = open_drafter(with_config(drafter, config | {key: value}))
        opened_target = open_target(with_config(target, TARGET))
        check_pair(opened_target.config, opened.config)
        raise (
            LoadError("mask_token_id 0 is a token like any other") if value == 0 else AssertionError
        )
    one_line(caught)


@pytest.mark.parametrize("ids", [[-1, 1], [0, 10**8], [0, 10**400], [True], [], "01", 10**400])
def test_target_layers_of_a_drafter(target, drafter, ids):
    config = ZLAB | {"dflash_config": {"mask_token_id": 39, "target_layer_ids": ids}}
    with pytest.raises(LoadError, match="target.layer.ids") as caught:
        opened = open_drafter(with_config(drafter, config))
        check_pair(open_target(with_config(target, TARGET)).config, opened.config)
    one_line(caught)


def test_layers_are_not_built_from_a_promise(drafter):
    """Also not their masks, with and without kinds of layers."""
    for more in (
        {},
        {"layer_types": None},
        {"dflash_config": ZLAB["dflash_config"] | {"use_swa": True}},
    ):
        config = ZLAB | {"num_hidden_layers": 10**8, "sliding_window": 8} | more
        with pytest.raises(LoadError, match="num_hidden_layers is 100000000, expected"):
            open_drafter(with_config(drafter, config))


NAMES = {
    "NUL": "a\0b",
    "long": "a" * 5000,
    "surrogate": "\ud800.safetensors",
    "long folder": "a" * 300 + "/b",
    "empty": "",
    "dot": ".",
    "folder": "sub/",
    "outside": "../" * 3000 + "etc/passwd",
    "absolute": "/etc/passwd",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_shards(tmp_path, name):
    write(tmp_path, TARGET, target_tensors(), shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    first = next(iter(index))
    write_index(tmp_path, index | {first: NAMES[name]})
    with pytest.raises(LoadError, match="index.json") as caught:
        open_target(tmp_path)
    one_line(caught)


def test_links_in_a_circle(tmp_path):
    write(tmp_path, TARGET, target_tensors(), shards=2)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(LoadError, match="model-00001-of-00002") as caught:
        open_target(tmp_path)
    one_line(caught)


@pytest.mark.parametrize(
    "source", ["a" * 5000, "a\0b", "~nobody-of-that-name/x", "a/b/" + "c" * 300]
)
def test_names_of_models(source):
    with pytest.raises(LoadError) as caught:
        local_folder(source)
    one_line(caught)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, "added token -1"),
        ({"added_tokens_decoder": {str(2**40): {"content": "a"}}}, f"added token {2**40}"),
        ({"added_tokens_decoder": {"1" * 5000: {"content": "a"}}}, "ValueError"),
        ({"added_tokens_decoder": {"3": {"content": 5}}}, "the text of a token is 5"),
        ({"added_tokens_decoder": {"3": 5}}, "TypeError"),
        ({"eos_token": {"content": 5}}, "the text of a token is 5"),
        ({"eos_token": ["a"]}, "TypeError"),
        ({"chat_template": [{"name": "default", "template": 7}]}, "a chat template is 7"),
        ({"chat_template": [{"name": 7, "template": "x"}]}, "the name of a template is 7"),
        ({"chat_template": [["default", "x"]]}, "TypeError"),
    ],
)
def test_entries_of_a_tokenizer_config(tmp_path, config, named, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as users run
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=named) as caught:
        read_text_config(tmp_path)
    assert "tokenizer_config.json" in one_line(caught)


def test_a_number_of_too_many_digits_is_one_line(target):
    (target / "config.json").write_text('{"hidden_size": 1' + "0" * 5000 + "}")
    with pytest.raises(LoadError, match="is not JSON") as caught:
        open_target(target)
    one_line(caught)


@pytest.mark.parametrize("offset", [2**62, -(2**62), 10**6])
def test_draft_ids_that_overflow(tmp_path, offset):
    tensors = speculators_tensors()
    tensors["d2t"] = np.full_like(tensors["d2t"], offset)
    with pytest.raises(LoadError, match="d2t") as caught:
        open_drafter(write(tmp_path, SPECULATORS, tensors))
    one_line(caught)
