"""Trains a byte-level BPE tokenizer like Qwen3's, and writes it into a model folder."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from jaxspec.errors import LoadError
from jaxspec.text.tokenizer_files import CONFIG_FILE, VOCABULARY_FILE
from jaxspec.training.whole_files import write_text_whole

END, MASK = "<|endoftext|>", "<|mask|>"
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Text is cut into these pieces before bytes are merged; the pattern is Qwen's."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, longest: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text_whole(folder / VOCABULARY_FILE, tokenizer.to_str(pretty=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "mask_token": MASK,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, "special": True}
            for token in (END, MASK)
        },
    }
    write_text_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def special_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    """The id of `END` or `MASK`."""
    id = tokenizer.token_to_id(token)
    if id is None:
        raise LoadError(f"the tokenizer has no token {token}; use one that was trained here")
    return id
