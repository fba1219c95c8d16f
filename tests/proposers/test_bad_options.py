"""What cannot be meant is refused when the engine is made, with what can be."""

import jaxtyping
import pytest

from jaxspec import generate
from jaxspec.engine.plan.methods import choose_method
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.errors import UsageError
from jaxspec.proposers.methods import METHODS


@pytest.mark.parametrize(
    ("options", "found", "expected"),
    [
        (dict(draft_sampling="greedy"), "draft_sampling is 'greedy'", "drawn, likeliest"),
        (dict(num_drafts=0), "num_drafts is 0", "at least 1"),
        (dict(min_ngram=0), "min_ngram is 0", "1 to max_ngram"),
        (
            dict(min_ngram=4, max_ngram=3),
            "min_ngram is 4 and max_ngram 3",
            "min_ngram <= max_ngram",
        ),
        (dict(ngram_match="last"), "ngram_match is 'last'", "recent, earliest"),
        (dict(ngram_look_back=5), "ngram_look_back is 5", "more than max_ngram (5)"),
        (dict(ngram_threshold=1.5), "ngram_threshold is 1.5", "[0, 1]"),
        (dict(ngram_threshold=-0.1), "ngram_threshold is -0.1", "[0, 1]"),
        (dict(ngram_threshold=float("nan")), "ngram_threshold is nan", "[0, 1]"),
        (dict(ngram_warm_up=-1), "ngram_warm_up is -1", "0 or more"),
        (dict(ngram_probe_every=0), "ngram_probe_every is 0", "at least 1"),
    ],
    ids=str,
)
def test_options(options, found, expected, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run
    with pytest.raises(UsageError) as refusal:
        EngineOptions(**options)
    assert found in str(refusal.value) and expected in str(refusal.value)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("eagle", ", ".join(("auto", *METHODS))),
        ("dflash", "draft="),
        ("eagle3", "draft="),
        ("dflash+ngram", "draft="),
        ("dspark", "draft="),
    ],
)
def test_methods(method, expected):
    with pytest.raises(UsageError, match=f"method is '{method.replace('+', '.')}'") as refusal:
        choose_method(method, has_drafter=False)
    assert expected in str(refusal.value)


def test_auto_takes_what_is_there():
    assert choose_method("auto", has_drafter=True) == "dflash"
    assert choose_method("auto", has_drafter=True, kind="dspark") == "dspark"
    assert choose_method("auto", has_drafter=False) == "none"


def test_a_check_that_must_fail_is_not_begun(capsys):
    command = ["--model", "none", "--prompt", "a", "--temperature", "1", "--check"]
    assert generate.main(command) == 2
    assert "--draft-sampling likeliest" in capsys.readouterr().err


def test_a_method_of_another_kind_of_drafter_is_refused():
    with pytest.raises(UsageError, match="of the kind 'other'; expected 'other\\+ngram', or auto"):
        choose_method("dflash+ngram", has_drafter=True, kind="other")
    assert choose_method("auto", has_drafter=True, kind="other") == "other"
    assert choose_method("dflash", has_drafter=True, kind="dflash") == "dflash"
    assert choose_method("none", has_drafter=True, kind="other") == "none"
