"""Reads the inputs of a run: its text as sequences of tokens, the mask token, and their hashes."""

from pathlib import Path

from jaxspec.errors import UsageError
from jaxspec.models.config import TargetConfig
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.training.data import Sequences, sequences_of_documents
from jaxspec.training.documents import Document, read_documents, summary
from jaxspec.training.fingerprints import hash_of_text, hash_of_tokenizer, hash_of_weights
from jaxspec.training.notices import notice
from jaxspec.training.recipe import TrainingInputs


def mask_token(inputs: TrainingInputs, tokenizer: Tokenizer, config: TargetConfig) -> int:
    if inputs.mask_token_id is not None:
        return inputs.mask_token_id
    if "mask_token" in tokenizer.special_tokens:
        return tokenizer.special_tokens["mask_token"]
    if tokenizer.vocabulary_size >= config.vocab_size:
        raise UsageError(
            f"all {config.vocab_size} ids of the target's embedding have a token, and none of "
            "them is a mask; name an id that the data never uses with --mask-token-id"
        )
    return tokenizer.vocabulary_size


def text_of_run(
    inputs: TrainingInputs, block_size: int, tokenizer: Tokenizer, config: TargetConfig
) -> tuple[list[Document], Sequences]:
    """The documents of a run and their sequences. One line says which files were left out."""
    documents, no_text = read_documents(inputs.data)
    ends = config.eos_token_ids
    sequences, short = sequences_of_documents(
        documents,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        ends[0] if ends else None,
        inputs.length,
        block_size,
        config.vocab_size,
    )
    if left_out := no_text + short:
        count = len(documents) + len(no_text)
        notice(f"{len(left_out)} of {count} files are left out: {summary(left_out)}")
    return documents, sequences


def content_of(target: Path, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, str]:
    """Hashes of what is read from files, for train_config.json."""
    return {
        "data_sha256": hash_of_text(document.text for document in documents),
        "tokenizer_sha256": hash_of_tokenizer(tokenizer),
        "target_sha256": hash_of_weights(target),
    }
