"""How the 8-bit weights of a target are stored: reads `quantization_config` of a config.json.

    quant_method          one scale belongs to                       its name beside X.weight
    fp8                   a block of 128x128, or all of a matrix     X.weight_scale_inv
    compressed-tensors    the same, or one output ("channel")        X.weight_scale

In both, a weight is the stored number times its scale. The dtype of each tensor says whether it is
in 8 bits, so the lists of modules that were not quantised are ignored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxspec.checkpoint.entries import Entries, read_entries
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.fp8 import Fp8
from jaxspec.models.sharding import block_sides
from pallas_kernels.fp8_product import BLOCK

KEY = "quantization_config"
Quantization = Literal["fp8"] | None
"""How weights that are stored in 16 or 32 bits are quantised while they are read: in blocks of
128x128; None if they are not."""
QUANTIZATIONS = ("fp8", None)
Scaled = Literal["block", "channel", "tensor"]
BLOCKS = [BLOCK, BLOCK]
ENTRY = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": BLOCKS,
    "modules_to_not_convert": ["lm_head"],
}
"""The value of that key for weights that are quantised here."""


OF_DRAFTER = "draft_quantization"
"""The name of the option that quantises a drafter, as `quantization` does a target."""


def check_quantization(quantization: object, option: str = "quantization") -> None:
    if quantization not in QUANTIZATIONS:
        raise UsageError(f"{option} is {quantization!r}; expected None or 'fp8'")


@dataclass(frozen=True)
class Fp8Layout:
    """The names and shapes of the scales in a folder."""

    scaled: Scaled
    """What one scale belongs to: a block of 128x128 numbers, an output, or a whole matrix."""
    scale: str
    """The last part of a scale's name."""

    @property
    def fp8(self) -> Fp8:
        """How the layers store such matrices: the scale of a whole matrix once for each output."""
        return Fp8(blocks=self.scaled == "block")

    def check_sizes(self, decoder: Decoder, where: str) -> None:
        if self.scaled == "block":
            check_whole_blocks(decoder, where)


def check_whole_blocks(
    decoder: Decoder,
    where: str,
    instead: str = "use FP8 weights with a scale per channel, or bfloat16",
) -> None:
    """Refuses sizes that are not multiples of a block: matrices are joined, and a block must not
    reach from one into the next. `instead` says what to do."""
    sides = {"hidden_size": decoder.hidden_size, **block_sides(decoder)}
    for name, size in sides.items():
        if size % BLOCK:
            raise LoadError(
                f"{where}: {name} is {size}, expected a multiple of {BLOCK} for FP8 weights in "
                f"blocks of {BLOCK}x{BLOCK}; {instead}"
            )


def read_fp8_layout(folder: Path) -> Fp8Layout | None:
    return fp8_layout_of(read_entries(folder / "config.json"))


def fp8_layout_of(config: Entries) -> Fp8Layout | None:
    """The layout of the FP8 weights; None if the config does not mention a quantisation."""
    if config.get(KEY) is None:
        return None
    entries = config.within(KEY)
    method = entries.text("quant_method")
    if method == "fp8":
        return _official(entries)
    if method == "compressed-tensors":
        return _compressed(entries)
    raise _unsupported(entries, "quant_method", "fp8 or compressed-tensors")


def _official(entries: Entries) -> Fp8Layout:
    _require(entries, "fmt", "e4m3", absent=True)
    _require(entries, "activation_scheme", "dynamic", absent=True)
    _require(entries, "scale_fmt", "float", absent=True)
    for key in ("modules_to_not_convert", "ignored_layers"):
        entries.texts(key)
    _refuse_unknown(entries, OFFICIAL)
    if entries.values.get("weight_block_size", BLOCKS) is None:
        return Fp8Layout("tensor", "weight_scale_inv")
    _require(entries, "weight_block_size", BLOCKS)
    return Fp8Layout("block", "weight_scale_inv")


OFFICIAL = (
    "quant_method",
    "fmt",
    "activation_scheme",
    "scale_fmt",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "dequantize",
)


def _compressed(entries: Entries) -> Fp8Layout:
    _require(entries, "format", "float-quantized", absent=True)
    _require(entries, "quantization_status", "compressed", absent=True)
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if entries.get(key):
            raise _unsupported(entries, key, "null")
    entries.texts("ignore")
    _refuse_unknown(entries, COMPRESSED)
    groups = entries.within("config_groups")
    if len(groups.values) != 1:
        raise LoadError(
            f"{groups.where} has {len(groups.values)} groups, expected one, of all linear layers; "
            "use a checkpoint whose layers are quantised alike"
        )
    group = groups.within(next(iter(groups.values)))
    _require(group, "targets", ["Linear"])
    _require(group, "format", "float-quantized", absent=True)
    if group.get("output_activations"):
        raise _unsupported(group, "output_activations", "null")
    scaled = _weights(group.within("weights"))
    _check_inputs(group.within("input_activations"), scaled)
    return Fp8Layout(scaled, "weight_scale")


COMPRESSED = (
    "quant_method",
    "format",
    "quantization_status",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "ignore",
    "config_groups",
    "global_compression_ratio",
    "version",
)


def _weights(weights: Entries) -> Scaled:
    _check_numbers(weights)
    _require(weights, "dynamic", False, absent=True)
    strategy = weights.text("strategy")
    if strategy == "block":
        _require(weights, "block_structure", BLOCKS)
        return "block"
    if strategy == "channel":
        return "channel"
    if strategy == "tensor":
        return "tensor"
    raise _unsupported(weights, "strategy", "block, channel or tensor")


def _check_inputs(inputs: Entries, scaled: Scaled) -> None:
    """Checks that activations are to be scaled dynamically, as the layers here scale them."""
    if not inputs.values:
        return
    _check_numbers(inputs)
    _require(inputs, "dynamic", True)
    if scaled == "block":
        _require(inputs, "strategy", "group")
        _require(inputs, "group_size", BLOCK)
    else:
        _require(inputs, "strategy", "token")


def _check_numbers(entries: Entries) -> None:
    _require(entries, "num_bits", 8)
    _require(entries, "type", "float")
    _require(entries, "symmetric", True, absent=True)
    if entries.get("actorder"):
        raise _unsupported(entries, "actorder", "null")


def _require(entries: Entries, key: str, expected: object, absent: bool = False) -> None:
    """Refuses other values; `absent` says whether a missing or null one means the expected one."""
    found = entries.get(key)
    if (absent and found is None) or (found == expected and type(found) is type(expected)):
        return
    raise _unsupported(entries, key, str(expected).lower())


def _refuse_unknown(entries: Entries, known: tuple[str, ...]) -> None:
    """A key that we do not know may change what the numbers mean."""
    for key, value in entries.values.items():
        if key not in known and value not in (None, False, [], {}):
            raise _unsupported(entries, key, "absent")


def _unsupported(entries: Entries, key: str, instead: str) -> LoadError:
    if key in entries.values:
        return entries.unsupported(key, instead)
    return entries.wrong(key, instead)
