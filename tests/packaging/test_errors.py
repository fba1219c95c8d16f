"""The messages of errors that a user can fix."""

import pickle

import pytest

from jaxspec.engine.requests.failures import RequestFailed
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
