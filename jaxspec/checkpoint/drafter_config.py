"""Reads the config.json of a drafter of any kind."""

from pathlib import Path

from jaxspec.checkpoint import draft_config
from jaxspec.checkpoint.eagle3_config import eagle3_config_of, is_eagle3
from jaxspec.checkpoint.entries import Entries, read_entries
from jaxspec.models.config import DrafterConfig


def is_drafter(config: Entries) -> bool:
    """Whether a config.json belongs to a drafter of any kind, including those we refuse."""
    return is_eagle3(config) or draft_config.is_drafter(config)


def read_drafter_config(folder: Path, block_size: int | None = None) -> DrafterConfig:
    """The part of the config that is in config.json. The headers of the weights show the rest."""
    draft_config.check_block_size(block_size)
    config = read_entries(folder / "config.json")
    read = eagle3_config_of if is_eagle3(config) else draft_config.draft_config_of
    return read(config, folder, block_size)
