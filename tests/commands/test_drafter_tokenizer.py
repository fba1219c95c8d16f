"""A drafter whose folder has a tokenizer of its own, through the command."""

import json
import shutil
from pathlib import Path

import pytest

from jaxspec import generate
from jaxspec.demo import demo_pair
from jaxspec.engine.setup.load_models import open_models

TARGET, DRAFTER = demo_pair()


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """The demo pair's drafter, with a copy of its target's tokenizer."""
    folder = shutil.copytree(DRAFTER, tmp_path / "drafter")
    shutil.copy(TARGET / "tokenizer.json", folder)
    return folder


def test_another_vocabulary_is_refused_in_one_line(drafter, capsys):
    file = drafter / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    [was] = [text for text, id in tokenizer["model"]["vocab"].items() if id == 300]
    tokenizer["model"]["vocab"]["other"] = tokenizer["model"]["vocab"].pop(was)
    tokenizer["model"]["merges"] = []
    file.write_text(json.dumps(tokenizer))
    models = ["--model", str(TARGET), "--draft-model", str(drafter)]
    assert generate.main([*models, "--prompt", "a"]) == 1
    out, err = capsys.readouterr()
    said, error = err.splitlines(keepends=True)
    assert said.startswith("running on ") and not out
    assert error == (
        "error: the drafter does not fit the target: token 300 is 'other' in its tokenizer.json, "
        f"expected the target's {was!r}; use the target it was trained on\n"
    )


def test_the_same_tokenizer_is_taken(drafter):
    opened = open_models(TARGET, drafter, dtype="float32")
    assert len(opened.models.proposers) == 1
