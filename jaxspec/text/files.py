"""The tokenizer files of a Hugging Face folder, read and checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError

VOCABULARY_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (VOCABULARY_FILE, CONFIG_FILE, TEMPLATE_FILE, f"{NAMED_TEMPLATES}/*.jinja")
"""Glob patterns of every file this room reads: what to download, what to copy."""

SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class TextConfig:
    """What tokenizer_config.json and the template files say."""

    special_tokens: Mapping[str, str]
    """Text of each special token by its role, such as `eos_token`."""
    added_tokens: Mapping[int, str]
    """Text of each token that the config claims was added to the vocabulary, by id."""
    chat_templates: Mapping[str, str]
    """Template source by name; the usual one is called `default`."""


def one_line(error: BaseException) -> str:
    """The message of a foreign error, fit for a one-line report."""
    return " ".join(str(error).split()) or type(error).__name__


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read {path}: {one_line(error)}; download it again") from error


def read_text_config(folder: Path) -> TextConfig:
    """Reads a folder that may lack any of these files; a damaged one is a LoadError."""
    config = _read_json_object(folder / CONFIG_FILE)
    try:
        return TextConfig(
            special_tokens=_special_tokens(config),
            added_tokens=_added_tokens(config),
            chat_templates=_templates_in_config(config) | _templates_in_files(folder),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {one_line(error)}"
        raise LoadError(
            f"{folder / CONFIG_FILE} is not a tokenizer config ({found}); download it again"
        ) from error


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON: {one_line(error)}; download it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {f"{role}_token": config.get(f"{role}_token") for role in SPECIAL_ROLES}
    return {role: _content(token) for role, token in named.items() if token is not None}


def _added_tokens(config: dict[str, Any]) -> dict[int, str]:
    added = config.get("added_tokens_decoder") or {}
    return {int(id): _content(token) for id, token in added.items()}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _templates_in_config(config: dict[str, Any]) -> dict[str, str]:
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    return {entry["name"]: entry["template"] for entry in template}


def _templates_in_files(folder: Path) -> dict[str, str]:
    named = {path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        named["default"] = folder / TEMPLATE_FILE
    return {name: read_text(path) for name, path in named.items()}
