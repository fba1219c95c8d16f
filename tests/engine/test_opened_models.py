"""Models opened by one call: as pure functions, without a tokenizer, and in the dtype that fits."""

import logging
import shutil

import jax
import jax.numpy as jnp
import pytest
from golden_pair import GOLDENS, HOUSE, budget, opened, trajectories

import jaxspec
from jaxspec import Engine, LoadError, UsageError, open_models
from jaxspec.engine.setup.load_models import auto_dtype, choose_dtype

TARGET, DRAFT = GOLDENS / "a" / "target", GOLDENS / "a" / "draft"


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids") / "target"
    leave_out = shutil.ignore_patterns("tokenizer*")
    return shutil.copytree(TARGET, folder, ignore=leave_out)


# Pure functions


def test_the_logits_are_those_that_the_engine_decodes_by():
    case = trajectories()[1]
    tokens = jnp.array([[*case["prompt"], *case["greedy"][:20]]])
    logits = jax.jit(opened().logits)(opened().params["target"], tokens)
    first = len(case["prompt"]) - 1
    assert jnp.argmax(logits[0, first:], axis=-1).tolist() == case["greedy"][:21]


def test_the_target_can_be_differentiated():
    tokens = jnp.array([trajectories()[1]["greedy"][:8]])

    def loss(params):
        logits = opened().logits(params, tokens)
        return -jax.nn.log_softmax(logits)[0, :-1][jnp.arange(7), tokens[0, 1:]].mean()

    params = opened().params["target"]
    of_loss = jax.jit(jax.value_and_grad(loss))
    value, gradients = of_loss(params)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    step = jax.tree.map(lambda x, g: x - 0.01 * g, params, gradients)
    assert of_loss(step)[0] < value


def test_features_are_those_that_the_drafter_reads():
    tokens = jnp.array([trajectories()[1]["greedy"][:8]])
    hidden, features = opened().features(opened().params["target"], tokens)
    size = opened().target.config.decoder.hidden_size
    assert hidden.shape == (1, 8, size)
    assert features.shape == (1, 8, size * len(opened().drafter.config.target_layer_ids))
    alone = open_models(TARGET, dtype="float32")
    assert alone.drafter is None and alone.target.capture == () and "drafter" not in alone.params


def test_an_engine_over_opened_models_shares_their_weights():
    engine = Engine.from_models(opened().models, opened().params, **HOUSE)
    assert engine.params["target"] is opened().params["target"]


# Without a tokenizer


def test_ids_need_no_tokenizer_and_text_is_refused_in_a_line(without_tokenizer):
    options = dict(dtype="float32", driver="overlapped", **HOUSE)
    engine = Engine.from_pretrained(without_tokenizer, DRAFT, **options)
    assert engine.tokenizer is None and engine.chat_template is None
    case = trajectories()[1]
    output = engine.generate(case["prompt"], budget(5))
    assert list(output.token_ids) == case["greedy"][:5] and output.text == ""
    with pytest.raises(UsageError, match="no tokenizer; give token ids, or put .*tokenizer.json"):
        engine.generate("text", max_tokens=5)
    with pytest.raises(UsageError, match="stop needs text"):
        engine.generate(case["prompt"], max_tokens=5, stop="x")


def test_a_damaged_tokenizer_is_still_an_error(without_tokenizer, tmp_path):
    folder = shutil.copytree(without_tokenizer, tmp_path / "target")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="not a tokenizer"):
        open_models(folder)


# Dtype


def test_the_automatic_dtype_is_what_commands_choose():
    demo, _ = jaxspec.demo_pair()
    assert auto_dtype(demo) == auto_dtype(str(demo)) == "float32"
    assert auto_dtype("a" * 5000) == auto_dtype("\0") == "bfloat16"
    assert auto_dtype(TARGET) == auto_dtype("Qwen/Qwen3-8B") == "bfloat16"
    assert choose_dtype("auto", demo) == jnp.float32
    assert open_models(TARGET).target.dtype == jnp.bfloat16
    assert choose_dtype(jnp.bfloat16) == jnp.bfloat16
    with pytest.raises(UsageError, match="expected one of auto, bfloat16, float32"):
        choose_dtype("fp16")


# The log


def test_the_log_says_what_was_read(caplog, without_tokenizer):
    with caplog.at_level(logging.INFO, logger="jaxspec"):
        open_models(without_tokenizer, DRAFT)
    told = [record.getMessage() for record in caplog.records if record.name == "jaxspec"]
    assert f"no tokenizer.json in {without_tokenizer}: prompts must be token ids" in told
    read = [line for line in told if line.startswith("read ")]
    assert len(read) == 2 and read[1].startswith(f"read {DRAFT}: ")
    assert all(" GB as bfloat16 in " in line and line.endswith(" s") for line in read)
