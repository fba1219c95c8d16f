"""One of two processes that run an engine together, for `test_two_processes.py`.

    python one_of_two_processes.py PORT PROCESS_ID OPTIONS

The options are those of several engines, as JSON. Runs the engines one after the other, checks
their outputs for the first goldens, and prints the tokens of each as a line of JSON. With "die"
process 1 ends itself after so many events, and with "stop" it stops answering.
"""

import json
import os
import pathlib
import signal
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / "engine")]


BUDGETS = 30, 5, 17, 24


def main() -> None:
    port, process = int(sys.argv[1]), int(sys.argv[2])
    from jaxspec.engine.setup.processes import join_processes

    join_processes(f"localhost:{port}", 2, process, dead_after=10)
    import jax

    assert jax.local_device_count() == 1 and jax.device_count() == 2
    for options in json.loads(sys.argv[3]):
        run(process, options)


def run(process: int, options: dict) -> None:
    from golden_pair import GOLDENS, HOUSE, budget, check_golden, trajectories

    from jaxspec import Engine

    dies_after, stops_after = options.pop("die", None), options.pop("stop", None)
    target, draft = (GOLDENS / "a" / name for name in ("target", "draft"))
    given = {"dtype": "float32", "tensor_parallel_size": 2, **HOUSE, **options}
    engine = Engine.from_pretrained(target, draft, **given)
    cases = trajectories("a")[: len(BUDGETS)]
    params = [budget(most) for most in BUDGETS]
    ended = {}
    for number, event in enumerate(engine.stream([case["prompt"] for case in cases], params)):
        if process == 1 and number == dies_after:
            os._exit(9)
        if process == 1 and number == stops_after:
            os.kill(os.getpid(), signal.SIGSTOP)
        if event.output is not None:
            ended[event.index] = event.output
    for index, output in ended.items():
        if given.get("method", "dflash") == "dflash" and not given.get("adaptive"):
            check_golden(output, cases[index], BUDGETS[index])
    print(json.dumps({index: list(output.token_ids) for index, output in sorted(ended.items())}))


main()
