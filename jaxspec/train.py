"""`python -m jaxspec.train --target MODEL --data FILES --out DIR`: a drafter for a target."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import cli


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _train(arguments), arguments.debug)


def _train(arguments: argparse.Namespace) -> None:
    from jaxspec.checkpoint.hub import local_folder
    from jaxspec.training.new_drafter import DrafterShape
    from jaxspec.training.recipe import Cadence, Optimization, Recipe
    from jaxspec.training.train_drafter import TrainingInputs, TrainingRun, train_drafter

    folder = local_folder(arguments.target, arguments.revision)
    hub_id = None if folder == Path(arguments.target).expanduser() else arguments.target
    given = vars(arguments) | {"target": folder}
    epochs = arguments.epochs if arguments.steps is None else None
    plan = TrainingRun(
        cli.filled(TrainingInputs, given),
        cli.filled(DrafterShape, given),
        cli.filled(Recipe, given),
        cli.filled(Optimization, given),
        cli.filled(Cadence, given),
        epochs=epochs,
        hub_id=hub_id,
    )
    try:
        trained = train_drafter(plan, arguments.out)
    except KeyboardInterrupt:
        cli.say(f"stopped; the same command goes on from what {arguments.out} holds")
        raise
    cli.say(f"{trained} (and speculators beside it)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxspec train",
        usage="%(prog)s --target MODEL --data FILE ... --out DIR [options]",
        description="Trains a DFlash drafter for a Qwen3 target. Run the same command again to "
        "resume. Writes OUT/zlab, OUT/speculators, OUT/log.jsonl and OUT/training.png.",
        allow_abbrev=False,
    )
    _add_files(parser)
    _add_drafter(parser.add_argument_group("drafter"))
    _add_recipe(parser.add_argument_group("what is learned"))
    _add_optimization(parser.add_argument_group("optimization"))
    parser.add_argument("--log-every", type=int, metavar="STEPS")
    parser.add_argument("--checkpoint-minutes", type=float, metavar="MINUTES")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", required=True, metavar="MODEL", help="folder or hub id of a Qwen3 model"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the target's hub id")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FILE", action=Several
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--length", type=int, help="tokens of a row [2048]")
    parser.add_argument(
        "--on-policy", action="store_true", help="let the target continue the beginnings of rows"
    )
    parser.add_argument(
        "--keep-features", action="store_true", help="compute target features once, keep on disk"
    )
    parser.add_argument("--shortest-prompt", type=int, metavar="TOKENS", help="of them [32]")
    parser.add_argument("--slots", type=int, help="rows continued at a time [64]")


def _add_drafter(group: Any) -> None:
    group.add_argument("--block-size", type=int, help="current token and drafts [16]")
    group.add_argument("--layers", type=int, help="of the drafter [5]")
    group.add_argument("--features", type=int, help="target layers listened to [5]")
    group.add_argument("--layer-ids", type=int, nargs="+", action=Several, help="those layers")
    group.add_argument("--intermediate-size", type=int, help="of the drafter [the target's]")
    group.add_argument("--draft-vocab-size", type=int, help="most frequent tokens drafted [all]")
    group.add_argument(
        "--from-target", action="store_true", help="start as copies of the target's last layers"
    )
    group.add_argument("--mask-token-id", type=int, help="[the tokenizer's, or an unused row]")


def _add_recipe(group: Any) -> None:
    group.add_argument("--anchors", type=int, help="blocks per row and step [512]")
    group.add_argument("--weighting", choices=("dpace", "decay"), help="of places [dpace]")
    group.add_argument("--decay", type=float, help="gamma [7 for blocks of 16, 5 of 10, 4 of 8]")
    group.add_argument("--dpace-floor", type=float, help="alpha [0.5]")
    group.add_argument("--labels", choices=("argmax", "data", "distill"), help="[argmax]")
    group.add_argument("--feature-noise", type=float, help="share of a feature row's size [0]")
    group.add_argument("--head-chunk", type=int, help="blocks per row with logits at once [64]")


def _add_optimization(group: Any) -> None:
    group.add_argument("--steps", type=int, help="instead of --epochs")
    group.add_argument("--epochs", type=float, default=6.0, help="passes over the data [6]")
    group.add_argument("--batch-size", type=int, help="rows per step, all devices [8]")
    group.add_argument("--accumulation", type=int, help="parts of a batch [1]")
    group.add_argument("--method", choices=("adamw", "muon"), help="[adamw]")
    group.add_argument("--learning-rate", type=float, help="[6e-4]")
    group.add_argument("--warmup", type=float, help="share of the steps [0.04]")
    group.add_argument("--clip", type=float, help="largest gradient norm [1]")
    group.add_argument("--weight-decay", type=float, help="[0]")
    group.add_argument("--second-moment", type=float, help="Adam's beta2 [0.999]")
    group.add_argument("--compute", choices=("bfloat16", "float32"), help="[bfloat16]")
    group.add_argument("--seed", type=int, help="[0]")


class Several(argparse.Action):
    """Keeps what is given as a tuple, as the records want it."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, tuple(values))


if __name__ == "__main__":
    sys.exit(main())
