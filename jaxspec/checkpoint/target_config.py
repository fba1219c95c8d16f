"""Reads the config.json and generation_config.json of a Qwen3 or Qwen3.5 target."""

from pathlib import Path

from jaxspec.checkpoint.decoder_config import decoder_of
from jaxspec.checkpoint.drafter_config import is_drafter
from jaxspec.checkpoint.entries import Entries, read_entries
from jaxspec.checkpoint.fp8_config import fp8_layout_of
from jaxspec.checkpoint.qwen35_config import is_qwen35, qwen35_config_of
from jaxspec.errors import LoadError
from jaxspec.models.config import Qwen3Config, TargetConfig

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def read_target_config(folder: Path) -> TargetConfig:
    entries = read_entries(folder / "config.json")
    generation = folder / "generation_config.json"
    has_generation = generation.is_file()
    ends = _end_ids(read_entries(generation)) if has_generation else ()
    return target_config_of(entries, ends)


def target_config_of(entries: Entries, more_end_ids: tuple[int, ...] = ()) -> TargetConfig:
    if is_qwen35(entries):
        of_text = _end_ids(entries.within("text_config"))
        return qwen35_config_of(
            entries, tuple(sorted({*_end_ids(entries), *of_text, *more_end_ids}))
        )
    _check_is_qwen3(entries)
    layout = fp8_layout_of(entries)
    decoder = decoder_of(entries, None if layout is None else layout.fp8)
    if layout is not None:
        layout.check_sizes(decoder, entries.where)
    _refuse_sliding_window(entries)
    return Qwen3Config(
        decoder=decoder,
        vocab_size=entries.integer("vocab_size", 1),
        tie_word_embeddings=entries.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(sorted({*_end_ids(entries), *more_end_ids})),
    )


def _check_is_qwen3(entries: Entries) -> None:
    names, kind = entries.texts("architectures"), entries.text("model_type")
    if is_drafter(entries):
        raise LoadError(f"{entries.where} belongs to a drafter, expected a Qwen3 target; swap both")
    if kind != MODEL_TYPE or (names and ARCHITECTURE not in names):
        raise LoadError(
            f"{entries.where} is {kind or 'nothing'} ({', '.join(names) or 'no architecture'}), "
            f"expected {MODEL_TYPE} ({ARCHITECTURE}) or qwen3_5; use a dense checkpoint of either"
        )


def _refuse_sliding_window(entries: Entries) -> None:
    if entries.flag("use_sliding_window", False):
        raise entries.unsupported("use_sliding_window", "false")
    if any(kind != "full_attention" for kind in entries.texts("layer_types")):
        raise entries.unsupported("layer_types", "full_attention in every layer")


def _end_ids(entries: Entries) -> tuple[int, ...]:
    """The end-of-text ids, of which the config may have one, a list, or none."""
    value = entries.get("eos_token_id")
    if value is None or value == []:
        return ()
    if isinstance(value, list):
        return entries.ids("eos_token_id")
    return (entries.integer("eos_token_id"),)
