"""The host's drafters forget requests that have ended, even if that fails at first."""

import pytest

from jaxspec.engine.schedule.drafters import MOST_FAILED, Drafters
from jaxspec.errors import one_line


class Forgetful:
    """A host proposer that keeps the tokens of requests, and whose release may raise."""

    def __init__(self):
        self.tokens: dict[int, list[int]] = {}
        self.fails = False
        self.releases = 0

    def commit(self, request, tokens, num_drafts=0, accepted=0):
        self.tokens.setdefault(request, []).extend(tokens)

    def propose(self, request, room):
        return ()

    def release(self, request):
        self.releases += 1
        if self.fails:
            raise MemoryError("none left")
        self.tokens.pop(request, None)


@pytest.fixture
def proposer():
    return Forgetful()


@pytest.fixture
def drafters(proposer):
    return Drafters(proposer, None)


def fail_to_release(drafters, proposer, *requests):
    for request in requests:
        drafters.commit(request, [1])
    proposer.fails = True
    with pytest.warns(RuntimeWarning, match="release of request") as told:
        drafters.release_all_but(())
    proposer.fails = False
    assert [one_line(one.message).split()[6] for one in told] == [str(one) for one in requests]


def test_a_release_that_raised_is_tried_again_with_the_next_one(drafters, proposer):
    fail_to_release(drafters, proposer, 1, 2)
    assert set(proposer.tokens) == {1, 2} and not drafters.known
    drafters.commit(3, [1])
    drafters.release_all_but(())
    assert not proposer.tokens and not drafters.failed


def test_a_request_that_was_read_again_keeps_its_new_tokens(drafters, proposer):
    fail_to_release(drafters, proposer, 1)
    drafters.commit(1, [5])
    drafters.commit(2, [1])
    drafters.release_all_but({1})
    assert set(proposer.tokens) == {1} and drafters.known == {1}
    drafters.release_all_but(())
    assert not proposer.tokens and not drafters.failed


def test_a_proposer_that_always_raises_is_asked_a_bounded_number_of_times(drafters, proposer):
    fail_to_release(drafters, proposer, *range(3 * MOST_FAILED))
    proposer.releases, proposer.fails = 0, True
    drafters.commit(-1, [1])
    with pytest.warns(RuntimeWarning, match="request -1 raised MemoryError: none left"):
        drafters.release_all_but(())
    assert proposer.releases == MOST_FAILED + 1


def test_if_no_request_ends_nothing_is_released(drafters, proposer):
    fail_to_release(drafters, proposer, 1)
    before = proposer.releases
    drafters.commit(2, [1])
    drafters.release_all_but({2})
    assert proposer.releases == before
