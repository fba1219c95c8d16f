"""The server as a Ray Serve deployment: Ray starts replicas and spreads requests over them.

    python examples/ray_serve.py --replicas 2

Needs `pip install 'ray[serve]' '.[serve]'`. Every replica is a process with an engine of its own;
on a machine with GPUs, `--gpus 1` gives each replica one of them. Send requests as to any server:

    curl localhost:8000/v1/models
"""

import argparse
from typing import Any

NAME = "jaxspec"


def application(model: str | None, draft_model: str | None, max_batch: int) -> Any:
    """The ASGI application of one replica. Imports happen here, in the replica's process."""
    from jaxspec import Engine, demo_pair
    from jaxspec.serving.app import asgi_app
    from jaxspec.serving.warming import warm

    pair = (model, draft_model) if model else tuple(map(str, demo_pair()))

    def open_engine() -> Engine:
        engine = Engine.from_pretrained(pair[0], pair[1], max_batch=max_batch)
        warm(engine, "auto", print)
        return engine

    return asgi_app(open_engine, model or NAME)


def deployment(options: argparse.Namespace) -> Any:
    """The deployment that Ray Serve runs: as many replicas as wanted, all under the same routes."""
    from ray import serve  # pyright: ignore[reportMissingImports]

    model = options.model, options.draft_model, options.max_batch

    class Replica:
        pass

    with_routes: Any = serve.ingress(lambda: application(*model))(Replica)
    deployed: Any = serve.deployment(
        num_replicas=options.replicas,
        max_ongoing_requests=2 * options.max_batch,
        ray_actor_options={"num_cpus": 1, "num_gpus": options.gpus},
    )(with_routes)
    return deployed.bind()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id (default: the demo pair)")
    parser.add_argument("--draft-model", help="folder or hub id of the drafter")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    from ray import serve  # pyright: ignore[reportMissingImports]

    options = parse()
    serve.start(http_options={"port": options.port})
    serve.run(deployment(options), blocking=True)


if __name__ == "__main__":
    main()
