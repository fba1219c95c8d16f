"""The pair of models in the package, which runs if no model is named and needs no download."""

from pathlib import Path

from jaxspec.errors import LoadError

NAME = "the demo pair"


def demo_pair() -> tuple[Path, Path]:
    """The folders of the target and the drafter, as `Engine.from_pretrained` takes them."""
    here = Path(__file__).parent
    pair = here / "target", here / "drafter"
    if missing := [folder for folder in pair if not (folder / "model.safetensors").is_file()]:
        raise LoadError(
            f"the demo pair is not in this installation: no weights in {missing[0]}; install "
            "jaxspec-decode again, or name another target with --model"
        )
    return pair


def is_demo_target(target: str | Path) -> bool:
    """Whether this is the folder of the pair's target."""
    try:
        return (Path(__file__).parent / "target").samefile(target)
    except (OSError, ValueError):  # no such folder, or a text that cannot name one
        return False


def demo_dtype() -> str:
    """The pair's default dtype: float32 on a CPU, which gives the tokens of plain decoding."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
