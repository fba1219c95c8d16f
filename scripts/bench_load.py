"""How fast a target loads from disk, how fast the disk is, and how much host memory loading takes.

    python scripts/bench_load.py --folder DIR --size 8b      (16.4 GB are written to DIR)

Prints one line of JSON, with the commit and the versions (the environment variable JAXSPEC_COMMIT
gives the commit if git cannot). Reading and loading are each measured with the files out of the
page cache ("cold", if the system drops them) and in it ("warm"). Every load is a fresh process.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import cli
from jaxspec.console.files import make_folder

GEOMETRIES = {
    "tiny": dict(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=32, vocab=512),
    "0.6b": dict(
        hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=151936
    ),
    "8b": dict(
        hidden=4096, inner=12288, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=151936
    ),
}
NUM_SHARDS = 5
STATES = ("cold", "warm")
BLOCK_BYTES = 64 * 2**20
READ_BYTES = 16 * 2**20
SAMPLE_SECONDS = 0.005
BF16_ONE, BF16_SIGN_AND_MANTISSA = 0x3F80, 0x807F


def main() -> None:
    arguments = parse()
    if arguments.measure:
        print(json.dumps(measure_load(arguments.folder, arguments.dtype)))
        return
    folder = arguments.folder / f"qwen3-{arguments.size}-random"
    make_folder(str(folder))
    try:
        result = benchmark(folder, arguments)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="where to write, on the disk")
    parser.add_argument("--size", choices=GEOMETRIES, default="8b")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="to load in"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON, besides stdout")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def benchmark(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    files, write_seconds = write_checkpoint(folder, GEOMETRIES[arguments.size])
    gigabytes = sum(path.stat().st_size for path in files) / 1e9
    say(f"wrote {gigabytes:.2f} GB in {write_seconds:.1f} s")
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "size": arguments.size}
    result |= {"gigabytes": gigabytes, "write_seconds": write_seconds}
    result["disk_gb_s"] = {
        f"{state}_{readers}_readers": disk_speed(files, readers, state == "cold")
        for state in STATES
        for readers in (1, 8)
    }
    say(f"disk, GB/s: {result['disk_gb_s']}")
    load = lambda state: load_in_fresh_process(folder, files, arguments, state)
    result["load"] = {state: load(state) for state in STATES}
    # From a process that loads, because this one does not use the device.
    result["environment"] = [run.pop("environment") for run in result["load"].values()][-1]
    cold = result["disk_gb_s"]["cold_8_readers"]
    return result | {
        "bar_gb_s": min(2.0, cold),
        "cold_load_gb_s": gigabytes / result["load"]["cold"]["seconds"],
        "warm_load_gb_s": gigabytes / result["load"]["warm"]["seconds"],
    }


def write_checkpoint(folder: Path, geometry: dict[str, int]) -> tuple[list[Path], float]:
    start = time.perf_counter()
    shapes = tensor_shapes(folder, geometry)
    names = np.array_split(list(shapes), NUM_SHARDS)
    block = random_block()
    files, file_of = [], {}
    for shard, own in enumerate(names, start=1):
        path = folder / f"model-{shard:05d}-of-{NUM_SHARDS:05d}.safetensors"
        write_shard(path, {str(name): shapes[name] for name in own}, block)
        files.append(path)
        file_of |= {str(name): path.name for name in own}
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files, time.perf_counter() - start


def tensor_shapes(folder: Path, geometry: dict[str, int]) -> dict[str, tuple[int, ...]]:
    from jaxspec.checkpoint.names import target_sources
    from jaxspec.checkpoint.target_config import read_target_config
    from jaxspec.models.config import Qwen3Config

    (folder / "config.json").write_text(json.dumps(config_of(**geometry)))
    config = read_target_config(folder)
    assert isinstance(config, Qwen3Config), "the config is a Qwen3's"
    sources = target_sources(config)
    tensors = {name: shape for source in sources.values() for name, shape in source.tensors.items()}
    return {name if "lm_head" in name else f"model.{name}": s for name, s in tensors.items()}


def config_of(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }


def random_block() -> bytes:
    """Random bfloat16 numbers between one and two, with either sign."""
    bits = np.random.default_rng(0).integers(0, 2**16, BLOCK_BYTES // 2, np.uint16)
    return (bits & BF16_SIGN_AND_MANTISSA | BF16_ONE).tobytes()


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: bytes) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for start in range(0, end, BLOCK_BYTES):
            file.write(block[: end - start])
        file.flush()
        os.fsync(file.fileno())


def disk_speed(files: list[Path], readers: int, cold: bool) -> float:
    """Gigabytes per second of reading the files without loading them."""
    forget(files) if cold else None
    pieces = [
        (path, offset) for path in files for offset in range(0, path.stat().st_size, READ_BYTES)
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(read_piece, pieces))
    return total / 1e9 / (time.perf_counter() - start)


buffers = threading.local()


def read_piece(piece: tuple[Path, int]) -> int:
    path, offset = piece
    if not hasattr(buffers, "mine"):
        buffers.mine = bytearray(READ_BYTES)
    file = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(file, [buffers.mine], offset)
    finally:
        os.close(file)


def forget(files: list[Path]) -> None:
    """Asks the system to drop the files from its page cache."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load_in_fresh_process(
    folder: Path, files: list[Path], arguments: argparse.Namespace, state: str
) -> dict[str, Any]:
    forget(files) if state == "cold" else None
    command = [sys.executable, __file__, "--measure", "--folder", str(folder)]
    run = subprocess.run(
        [*command, "--dtype", arguments.dtype], stdout=subprocess.PIPE, text=True, check=True
    )
    result = json.loads(run.stdout.splitlines()[-1])
    say(f"load, {state}: {result}")
    return result


def measure_load(folder: Path, dtype: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from jaxspec.checkpoint.load import open_target
    from jaxspec.measure.environment import environment

    resident_before_jax = resident_gb()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))
    with Peak() as peak:
        start = time.perf_counter()
        checkpoint = open_target(folder)
        opened = time.perf_counter()
        params = jax.block_until_ready(checkpoint.load(jnp.dtype(dtype)))
        done = time.perf_counter()
    check(params)
    return {
        "seconds": done - start,
        "seconds_to_open": opened - start,
        "peak_host_gb_above_start": peak.highest - peak.start,
        "host_gb_before_backend": resident_before_jax,
        "host_gb_at_start": peak.start,
        "host_gb_after": resident_gb(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "environment": environment(),
        "readers": reader_count(),
    }


def reader_count() -> int:
    from jaxspec.checkpoint.stream import READERS

    return READERS


def check(params: dict[str, Any]) -> None:
    """Checks that every number is between one and two, apart from its sign, as in the files."""
    import jax.numpy as jnp

    for name in ("embedding", "head", "norm"):
        (array,) = params[name].values()
        assert jnp.all((jnp.abs(array) >= 1) & (jnp.abs(array) < 2)), name


class Peak:
    """The most memory resident in this process while its `with` block runs."""

    def __enter__(self) -> "Peak":
        self.start = self.highest = resident_gb()
        self.stopped = threading.Event()
        self.sampler = threading.Thread(target=self.sample, daemon=True)
        self.sampler.start()
        return self

    def sample(self) -> None:
        while not self.stopped.wait(SAMPLE_SECONDS):
            self.highest = max(self.highest, resident_gb())

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.sampler.join()
        self.highest = max(self.highest, resident_gb())


def resident_gb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
