"""The byte-level tokenizer of a model folder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import tokenizers

from jaxspec.errors import LoadError, UsageError, one_line
from jaxspec.text.tokenizer_files import VOCABULARY_FILE, read_text_config

LONG_TEXT = 4096
"""Texts of at least this many characters are encoded while other threads may run."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back, exactly as the folder's tokenizer.json defines."""

    backend: tokenizers.Tokenizer = field(repr=False)
    """The library's tokenizer, with truncation and padding off."""
    special_tokens: Mapping[str, int]
    """Ids of the special tokens by role, such as `eos_token`."""
    special_ids: frozenset[int] = field(repr=False)
    """Ids that decoding with `skip_special_tokens` leaves out."""
    _known_bytes: dict[int, bytes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The bytes of the tokens that were looked up before."""

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens that have a text; the model's embedding may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[int, str]:
        """Every token by its id, added tokens included."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return {id: token for token, id in vocabulary.items()}

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.vocabulary.values()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. `add_special_tokens` runs the tokenizer's post-processor; a rendered
        chat does not need it, because it contains its special tokens already."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode ({one_line(error)}); give it as UTF-8"
            ) from error
        if len(text) < LONG_TEXT:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Only the library's calls for several texts let other Python threads run meanwhile.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; empty for an id in the embedding's padding."""
        if id not in self._known_bytes:
            self._known_bytes[id] = self._read_bytes(id)
        return self._known_bytes[id]

    def _read_bytes(self, id: int) -> bytes:
        token = self.backend.id_to_token(id)
        if token is None:
            return b""
        byte_of = _byte_of_character()
        try:
            return bytes(byte_of[character] for character in token)
        except KeyError:  # an added token is plain text and may hold any character
            return token.encode()


def open_tokenizer(folder: str | Path) -> Tokenizer:
    folder = Path(folder)
    backend = _read_backend(folder / VOCABULARY_FILE)
    config = read_text_config(folder)
    _check_added_tokens(backend, config.added_tokens, folder)
    ids = {role: backend.token_to_id(token) for role, token in config.special_tokens.items()}
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        backend=backend,
        special_tokens={role: id for role, id in ids.items() if id is not None},
        special_ids=frozenset(id for id, token in added.items() if token.special),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise LoadError(
            f"no {path.name} in {path.parent}: expected a Hugging Face model folder with its "
            "tokenizer; download the tokenizer files beside the weights"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is not a subclass of Exception
        raise LoadError(
            f"{path} is not a tokenizer that the tokenizers library can read "
            f"({one_line(error)}); download it again"
        ) from error
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        decoder = type(backend.decoder).__name__ if backend.decoder else "no"
        raise LoadError(
            f"{path} has {decoder} decoder, expected ByteLevel as in Qwen3; use a Qwen3 tokenizer"
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_added_tokens(
    backend: tokenizers.Tokenizer, claimed: Mapping[int, str], folder: Path
) -> None:
    for id, token in claimed.items():
        actual = backend.id_to_token(id)
        if actual != token:
            raise LoadError(
                f"token {id} is {token!r} in tokenizer_config.json but {actual!r} in "
                f"tokenizer.json of {folder}; take both files from the same model"
            )


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte behind each character that byte-level BPE writes.

    A printable byte is written as itself, every other one as the next unused character.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    unchanged = {chr(byte): byte for byte in printable}
    return unchanged | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
