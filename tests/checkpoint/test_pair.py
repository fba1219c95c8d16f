"""Whether a drafter fits a target."""

from dataclasses import replace

import pytest
from tiny_checkpoints import SPECULATORS, TARGET, ZLAB

from jaxspec.checkpoint.draft_config import draft_config_of
from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.pair import check_pair, check_same_tokenizer
from jaxspec.checkpoint.target_config import target_config_of
from jaxspec.errors import LoadError

TARGET_CONFIG = target_config_of(Entries(TARGET, "target"))
DRAFTER = draft_config_of(Entries(ZLAB, "drafter"))


def test_fits():
    check_pair(TARGET_CONFIG, DRAFTER)
    check_pair(TARGET_CONFIG, draft_config_of(Entries(SPECULATORS, "drafter")))
    check_pair(TARGET_CONFIG, replace(DRAFTER, num_target_layers=None))


def test_other_heads_are_no_misfit():
    decoder = replace(DRAFTER.decoder, num_heads=2, num_kv_heads=1, head_dim=4)
    check_pair(TARGET_CONFIG, replace(DRAFTER, decoder=decoder))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder": replace(DRAFTER.decoder, hidden_size=32)}, "hidden_size is 32"),
        ({"vocab_size": 41}, "vocab_size is 41"),
        ({"mask_token_id": 40}, "mask_token_id 40"),
        ({"num_target_layers": 4}, "num_target_layers"),
        ({"target_layer_ids": (0, 3)}, "outside the target"),
        ({"target_layer_ids": (-1, 1)}, "outside the target"),
        ({"target_layer_ids": (1, 0)}, "strictly increasing"),
        ({"target_layer_ids": (1, 1)}, "strictly increasing"),
        ({"target_layer_ids": (1, 2)}, "the last layer"),
    ],
)
def test_misfits(change, named):
    with pytest.raises(LoadError, match=named) as caught:
        check_pair(TARGET_CONFIG, replace(DRAFTER, **change))
    assert "\n" not in str(caught.value)


def test_tokenizers():
    check_same_tokenizer({0: "a", 1: "b"}, {0: "a", 1: "b"})
    check_same_tokenizer({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "<mask>"})
    with pytest.raises(LoadError, match="token 1 is 'c' .* expected the target's 'b'") as caught:
        check_same_tokenizer({0: "a", 1: "b", 2: "d"}, {2: "e", 1: "c", 0: "a"})
    assert "\n" not in str(caught.value)
