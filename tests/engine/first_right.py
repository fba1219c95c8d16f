"""A proposer for which a test decides how many drafts are right."""

from jaxspec.proposers.methods import METHODS, Method

NAME = "first right"


class FirstRight:
    """Proposes the first `right` tokens that plain decoding emitted, and a wrong one after them."""

    def __init__(self, known: dict[tuple[int, ...], tuple[int, ...]], right: int, vocab_size: int):
        self.known, self.right, self.vocab_size = known, right, vocab_size
        self.tokens: dict[int, list[int]] = {}

    def commit(self, request, tokens, num_drafts=0, accepted=0):
        self.tokens.setdefault(request, []).extend(tokens)

    def propose(self, request, room):
        tokens = tuple(self.tokens[request])
        [prompt] = [p for p in self.known if tokens[: len(p)] == p]
        right = [*prompt, *self.known[prompt]][len(tokens) :][: self.right]
        wrong = (
            ([*prompt, *self.known[prompt], 0][len(tokens) + len(right)]) + 1
        ) % self.vocab_size
        return [*right, wrong][:room]

    def release(self, request):
        self.tokens.pop(request, None)


def propose_right(monkeypatch, plain, right: int, vocab_size: int) -> None:
    """Makes NAME a method whose first `right` drafts of every step are tokens of these outputs."""
    known = {tuple(output.prompt_token_ids): output.token_ids for output in plain}
    method = Method(host=lambda options: FirstRight(known, right, vocab_size))
    monkeypatch.setitem(METHODS, NAME, method)
