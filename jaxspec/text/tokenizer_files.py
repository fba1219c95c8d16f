"""The tokenizer files of a Hugging Face folder, read and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError, one_line, shown
from jaxspec.files import read_json_object, read_text

VOCABULARY_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (VOCABULARY_FILE, CONFIG_FILE, TEMPLATE_FILE, f"{NAMED_TEMPLATES}/*.jinja")
"""Glob patterns of every file that a tokenizer and its chat template may consist of."""

LARGEST_ID = 2**31 - 1
SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class TextConfig:
    """The contents of tokenizer_config.json and of the chat template files."""

    special_tokens: Mapping[str, str]
    """Text of each special token by its role, such as `eos_token`."""
    added_tokens: Mapping[int, str]
    """Text, by id, of each token that the config lists as added to the vocabulary."""
    chat_templates: Mapping[str, str]
    """Template sources by name; the one for ordinary chats is called `default`."""


def read_text_config(folder: Path) -> TextConfig:
    """Reads the files that the folder has; a missing file is fine, a damaged one a LoadError."""
    path = folder / CONFIG_FILE
    config = read_json_object(path) if path.exists() else {}
    try:
        return TextConfig(
            special_tokens=_special_tokens(config),
            added_tokens=_added_tokens(config),
            chat_templates=_templates_in_config(config) | _templates_in_files(folder),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise LoadError(
            f"{path} is not a tokenizer config ({reason}); download it again"
        ) from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {f"{role}_token": config.get(f"{role}_token") for role in SPECIAL_ROLES}
    return {role: _content(token) for role, token in named.items() if token is not None}


def _added_tokens(config: dict[str, Any]) -> dict[int, str]:
    added = config.get("added_tokens_decoder") or {}
    ids = {int(id): _content(token) for id, token in added.items()}
    if wrong := [id for id in ids if not 0 <= id <= LARGEST_ID]:
        raise ValueError(f"added token {shown(wrong[0])} is outside 0 to {LARGEST_ID}")
    return ids


def _content(token: Any) -> str:
    return _string(token if isinstance(token, str) else token["content"], "the text of a token")


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {shown(value)}, expected a string")
    return value


def _templates_in_config(config: dict[str, Any]) -> dict[str, str]:
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    named = {entry["name"]: entry["template"] for entry in template}
    return {
        _string(name, "the name of a template"): _string(source, "a chat template")
        for name, source in named.items()
    }


def _templates_in_files(folder: Path) -> dict[str, str]:
    named = {path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        named["default"] = folder / TEMPLATE_FILE
    return {name: read_text(path) for name, path in named.items()}
