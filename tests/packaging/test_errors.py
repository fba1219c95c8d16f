"""The messages of errors that a user can fix."""

import pickle

import pytest

from jaxspec.engine.requests.failures import RequestFailed
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.stats.acceptance import RequestStats
from jaxspec.errors import LoadError, UsageError


@pytest.mark.parametrize("kind", [LoadError, UsageError, lambda text: RequestFailed(text, {})])
def test_a_message_is_one_line_whatever_names_it_quotes(kind):
    assert (
        str(kind("no tensor 'a\nb\x1b[2J' in it\u2028")) == r"no tensor 'a\nb\x1b[2J' in it\u2028"
    )


def test_other_scripts_and_quotes_stay_as_they_are():
    text = "no file 'größe/模型 \\x'"
    assert str(LoadError(text)) == text


def test_an_error_passes_from_one_process_to_another():
    again = pickle.loads(pickle.dumps(UsageError("a\nb")))
    assert isinstance(again, UsageError) and str(again) == r"a\nb"


def test_a_failed_request_leaves_the_process_of_a_pool_with_its_outputs():
    stats = RequestStats(prompt_tokens=1, generation_tokens=2)
    output = RequestOutput((1,), (2, 3), "ab", "error", None, None, stats)
    again = pickle.loads(pickle.dumps(RequestFailed("prompt 1\nfailed", {1: output})))
    assert isinstance(again, RequestFailed) and str(again) == r"prompt 1\nfailed"
    assert again.outputs == {1: output}
