"""`python -m jaxspec.train --target MODEL --data FILES --out DIR`: trains a drafter."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec import cli
from jaxspec.console.flags import add_flags, filled
from jaxspec.console.parser import Parser
from jaxspec.errors import LoadError
from jaxspec.training.recipe import Cadence, DrafterShape, Optimization, Recipe, TrainingInputs


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _train(arguments), arguments.debug)


def _train(arguments: argparse.Namespace) -> None:
    from jaxspec.checkpoint.hub import local_folder
    from jaxspec.training.documents import check_paths
    from jaxspec.training.option_limits import check_limits

    _check_installed()
    check_limits(vars(arguments))
    check_paths(arguments.data)
    folder = local_folder(arguments.target, arguments.revision)
    flags = vars(arguments) | {"target": folder}

    # Nothing above this imports jax, so that errors in the flags are reported at once.
    from jaxspec.training.train_drafter import TrainingRun, train_drafter

    plan = TrainingRun(
        filled(TrainingInputs, flags),
        filled(DrafterShape, flags),
        filled(Recipe, flags),
        filled(Optimization, flags),
        filled(Cadence, flags),
        epochs=arguments.epochs if arguments.steps is None else None,
        hub_id=None if folder == Path(arguments.target).expanduser() else arguments.target,
    )
    try:
        trained = train_drafter(plan, arguments.out)
    except KeyboardInterrupt:
        cli.say(f"stopped; run the same command again to resume from the state in {arguments.out}")
        raise
    beside = "" if trained.name == "speculators" else " (and speculators beside it)"
    cli.say(f"{trained}{beside}")


def _check_installed() -> None:
    if importlib.util.find_spec("optax") is None:  # importing it would import jax
        raise LoadError("training needs optax; install it with pip install 'jaxspec-decode[train]'")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec train",
        usage="%(prog)s --target MODEL --data FILE ... --out DIR [options]",
        description="Trains a drafter for a Qwen3 or Qwen3.5 target. Run the same command again to "
        "resume. Writes OUT/speculators, beside it OUT/zlab or OUT/deepspec, OUT/log.jsonl and, if "
        "matplotlib is installed, OUT/training.png.",
    )
    _add_files(parser.add_argument_group("files"))
    _add_data(parser.add_argument_group("data"))
    _add_drafter(parser.add_argument_group("drafter"))
    _add_recipe(parser.add_argument_group("what is learned"))
    _add_optimization(parser.add_argument_group("optimization"))
    add_flags(parser.add_argument_group("progress"), Cadence, "log_every", "checkpoint_minutes")
    cli.add_debug(parser)
    return parser


def _add_files(group: argparse._ArgumentGroup) -> None:
    hub_id_too = "Folder or hub id of a Qwen3 or Qwen3.5 model"
    add_flags(group, TrainingInputs, "target", type=str, metavar="MODEL", help=hub_id_too)
    group.add_argument(
        "--revision", help="Branch, tag or commit of the target's hub id (default: the newest)"
    )
    add_flags(group, TrainingInputs, "data")
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="Folder to write, or to resume from"
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    names = ("length", "on_policy", "shortest_prompt", "slots", "keep_features", "shared")
    add_flags(group, TrainingInputs, *names)


def _add_drafter(group: argparse._ArgumentGroup) -> None:
    add_flags(group, DrafterShape, "kind", "block_size", "layers", "features", "layer_ids")
    add_flags(group, DrafterShape, "intermediate_size", "draft_vocab_size", "from_target")
    add_flags(group, DrafterShape, "rank", "markov", "start_from")
    add_flags(group, TrainingInputs, "mask_token_id")


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    add_flags(group, Recipe, "anchors", "weighting", "decay", "dpace_floor", "labels")
    add_flags(group, Recipe, "feature_noise", "head_chunk")
    add_flags(group, Recipe, "dspark_weights", metavar="X")
    add_flags(group, Recipe, "selector_weight", "learn")


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    instead = "Optimizer steps, instead of --epochs (default: as many as its passes need)"
    add_flags(group, Optimization, "steps", default=None, help=instead)
    group.add_argument(
        "--epochs",
        type=float,
        default=6.0,
        metavar="X",
        help="Passes over the data (default: %(default)s)",
    )
    add_flags(group, Optimization, "batch_size", "accumulation", "method", "learning_rate")
    add_flags(group, Optimization, "warmup", "clip", "weight_decay", "second_moment")
    add_flags(group, Optimization, "compute", "seed")


if __name__ == "__main__":
    sys.exit(main())
