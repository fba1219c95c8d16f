"""The pair in the package, through the command that runs it when no model is named."""

import pathlib
import re

import pytest

from jaxspec import Engine, RequestOutput, SamplingParams, generate
from jaxspec.console.models import NamedModels, chosen_models
from jaxspec.demo import demo_pair
from jaxspec.errors import UsageError

PROMPT = "class Cache:"
SMALL = dict(max_batch=1, max_model_len=112)


@pytest.fixture(scope="module")
def outputs() -> list[RequestOutput]:
    """With drafts and without, from one engine."""
    engine = Engine.from_pretrained(*demo_pair(), dtype="float32", **SMALL)
    params = [SamplingParams(max_tokens=40, speculate=speculate) for speculate in (True, False)]
    return engine.generate([PROMPT, PROMPT], params)


def test_it_says_what_plain_decoding_says(outputs):
    drafted, plain = outputs
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 40
    assert plain.stats.num_spec_steps == 0
    assert "def __init__(self, " in drafted.text


def test_its_drafts_are_accepted(outputs):
    """It was 3.5 when the pair was made."""
    assert outputs[0].stats.mean_acceptance_length > 3.0


def test_the_command_says_what_it_runs(outputs, capsys):
    lengths = ["--max-tokens", "40", "--max-model-len", "112"]
    assert generate.main(["--prompt", PROMPT, *lengths]) == 0
    out, err = capsys.readouterr()
    assert out == outputs[0].text + "\n"
    first, *_ = err.splitlines()
    assert first.startswith("running on a CPU with ") and first.endswith("in float32")
    assert "the demo pair of the package" in first and "(no --model given)" in first
    length = outputs[0].stats.mean_acceptance_length
    assert f"mean acceptance length {length:.2f}" in err
    assert re.search(r"^weights: 29 MB ready in [\d.]+ s$", err, re.M)
    assert re.search(r"^programs: \d ready in [\d.]+ s$", err, re.M)
    assert re.search(r"^40 tokens in [\d.]+ s$", err, re.M)
    rates = r"\(\d+ against \d+ tokens/s, measured with 31 tokens\)"
    if_slower = ": a pass that checks drafts takes longer, and too few drafts were right"
    assert re.search(rf"plain decoding.*{rates}({if_slower})?$", err, re.M)


def test_the_first_command_of_the_readme_gives_as_many_tokens_per_pass_as_it_says(capsys):
    readme = pathlib.Path(__file__).resolve().parents[2].joinpath("README.md").read_text()
    assert f'-m jaxspec.generate --prompt "{PROMPT}"\n' in readme
    [said] = re.findall(r"on average \(([\d.]+)\s+for\s+this\s+prompt\)", readme)
    assert generate.main(["--prompt", PROMPT, "--no-compare"]) == 0
    assert f", {said} tokens per pass" in capsys.readouterr().err


def test_a_drafter_alone_does_not_get_the_target_of_the_pair():
    with pytest.raises(UsageError, match="does not name one; name it with --model"):
        chosen_models(NamedModels(draft_model=str(demo_pair()[1])))


def test_what_is_named_is_taken():
    assert chosen_models(NamedModels("a")) == NamedModels("a", None, "bfloat16")
    both = NamedModels("a", "b", "float32", 4, "main", "tag")
    assert chosen_models(both) == both
