import warnings

import pytest
from qwen_vocabulary import write_qwen_tokenizer


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory):
    return write_qwen_tokenizer(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def qwen(qwen_folder):
    from jaxspec.text.tokenizer import open_tokenizer

    return open_tokenizer(qwen_folder)


@pytest.fixture(scope="session")
def reference(qwen_folder):
    """The same folder opened by transformers, the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(qwen_folder)
