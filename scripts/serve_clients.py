"""Runs other people's clients against the server: openai, vLLM's benchmark client, lm-eval and
schemathesis; and the server in Ray Serve.

    python scripts/serve_clients.py --folder clients --json clients.json

Each client gets an environment of its own in the folder, which pip fills; what is there already is
used again. vLLM's wheel is downloaded without its dependencies, and only one file is taken from it.
The server runs on a CPU with the tiny pair of the tests. The script needs Python 3.12 and some
gigabytes of disk, because lm-eval may install torch.

These things must hold: openai accepts the type of every field; vLLM's client accepts every stream
and counts as many tokens as were asked for; lm-eval's log likelihoods are those of the engine in
this process; random requests that fit the description of the routes never make the server fail, or
answer in a form that is not described; both replicas in Ray answer with the texts of the engine.

If a client cannot be run or fails, the report names it with the reason, and the exit code is 1.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import about, write_json

from jaxspec import cli
from jaxspec.errors import LoadError, shortened

HERE = Path(__file__).parent
PAIR = HERE.parent / "tests" / "data" / "goldens" / "a"
MODEL, CONTEXT = "golden", 448
REQUESTS, TOKENS = 8, 16
VLLM_FILE = "vllm/benchmarks/lib/endpoint_request_func.py"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
CLOSE = 2e-3
"""Largest difference of two sums of log probabilities from batches of different shapes."""
SECONDS = 900


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = about()
    with served() as url:
        for name in options.only:
            report[name] = outcome(name, options.folder.resolve(), url)
            cli.say(f"{name}: {json.dumps(report[name])}")
    write_json(options.json, report)
    print(json.dumps({name: report[name] for name in options.only}, indent=2))
    if failed := [name for name in options.only if "failed" in report[name]]:
        raise LoadError(f"did not do what they must: {', '.join(failed)}")


def outcome(name: str, folder: Path, url: str) -> dict[str, Any]:
    """What a client reports, or why it failed, with the seconds that it took."""
    begin = time.perf_counter()
    try:
        report = CLIENTS[name](folder, url)
    except (LoadError, OSError, subprocess.TimeoutExpired) as error:
        report = {"failed": shortened(str(error), 500)}
    return report | {"seconds": round(time.perf_counter() - begin, 1)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for environments and files")
    parser.add_argument("--only", nargs="+", default=[*CLIENTS], choices=[*CLIENTS])
    parser.add_argument("--json", help="file for the report")
    return parser.parse_args()


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Runs a server of the tiny pair, and yields its address."""
    command = [
        sys.executable, "-m", "jaxspec.serve", "--model", str(PAIR / "target"), "--draft-model",
        str(PAIR / "draft"), "--dtype", "float32", "--max-batch", "4", "--max-model-len",
        str(CONTEXT), "--page-size", "16", "--served-model-name", MODEL, "--port", "0",
        "--default-max-tokens", "8",
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        try:
            said = []
            for line in server.stderr:
                said.append(line)
                if found := re.match(r"listening on (http://\S+)$", line):
                    yield found[1]
                    break
            else:
                raise LoadError(f"the server did not start: {shortened(''.join(said), 300)}")
        finally:
            server.terminate()
        if server.wait(SECONDS):
            raise LoadError(f"the server ended with {server.returncode}; run it by hand to see why")


def environment_with(folder: Path, name: str, *packages: str) -> Path:
    """The Python of an environment with these packages, which is made if it does not exist."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        run([str(python), "-m", "pip", "install", "-q", *packages])
    return python


def versions(python: Path, *packages: str) -> dict[str, str]:
    """The versions of packages in an environment."""
    listed = json.loads(run([str(python), "-m", "pip", "list", "--format", "json"]))
    return {one["name"]: one["version"] for one in listed if one["name"] in packages}


def run(command: list[str], **settings: Any) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, **settings)
    if ran.returncode:
        last = "\n".join((ran.stdout + ran.stderr).splitlines()[-40:])
        raise LoadError(f"{Path(command[0]).name} {command[1]} failed: {shortened(last, 2000)}")
    return ran.stdout


def openai(folder: Path, url: str) -> dict[str, Any]:
    """Checks that the openai package accepts every field and gets the texts of the engine."""
    python = environment_with(folder, "openai", "openai")
    helper = [str(python), str(HERE / "clients" / "openai_requests.py")]
    seen = json.loads(run([*helper, url, MODEL, *prompts()]))
    check(seen["texts"] == [text_of(prompt) for prompt in prompts()], f"openai got {seen}")
    check(seen["chat"] == seen["chat_streamed"] != "", "a streamed chat differs from a whole one")
    answers = len(seen["texts"]) + 2
    return {"versions": versions(python, "openai"), "answers": answers}


def vllm_bench(folder: Path, url: str) -> dict[str, Any]:
    """Checks that vLLM's client gets streams with as many tokens as it asked for."""
    python = environment_with(folder, "streams", "aiohttp", "regex", "tqdm")
    if not (wheels := sorted((folder / "vllm").glob("vllm-*.whl"))):
        download = [str(python), "-m", "pip", "download", "-q", "--no-deps", "vllm"]
        run([*download, "-d", str(folder / "vllm")])
        wheels = sorted((folder / "vllm").glob("vllm-*.whl"))
    with zipfile.ZipFile(wheels[-1]) as wheel:
        file = wheel.extract(VLLM_FILE, folder / "vllm")
    helper = [str(python), str(HERE / "clients" / "vllm_requests.py"), file]
    seen = json.loads(run([*helper, url, MODEL, str(REQUESTS), str(TOKENS)]))
    wrong = [one for one in seen if not one["success"] or one["output_tokens"] != TOKENS]
    check(len(seen) == 2 * REQUESTS and not wrong, f"vLLM's client did not accept {wrong}")
    check(all(0 < one["gaps"] < TOKENS and one["text"] for one in seen), "streams came in pieces")
    return {"versions": {"vllm": wheels[-1].name.split("-")[1]}, "streams": len(seen)}


def lm_eval(folder: Path, url: str) -> dict[str, Any]:
    """Checks that the log likelihoods of lm-eval's local-completions are those of the engine."""
    python = environment_with(folder, "lm-eval", "lm-eval[api]")
    tasks, out = folder / "tasks", folder / "lm-eval-results"
    tasks.mkdir(exist_ok=True)
    for name, text in tasks_of_lm_eval().items():
        (tasks / f"{name}.yaml").write_text(text)
    model = f"model={MODEL},base_url={url}/v1/completions,num_concurrent=4,max_length={CONTEXT}"
    command = [str(python), "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", model, "--tasks", "local_choice,local_text", "--include_path"]
    command += [str(tasks), "--output_path", str(out), "--log_samples"]
    run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    found = likelihoods(newest(out, "local_choice"))
    expected = {pair: likelihood(*pair) for pair in found}
    worst = max(abs(found[pair][0] - expected[pair][0]) for pair in found)
    greedy = [pair for pair in found if found[pair][1] != expected[pair][1]]
    check(worst < CLOSE and not greedy, f"lm-eval differs by {worst} and in {greedy}")
    texts = [line["resps"][0][0] for line in lines(newest(out, "local_text"))]
    check(texts == [text_of(prompt) for prompt in prompts()], f"lm-eval generated {texts}")
    counts = {"likelihoods": len(found), "largest_difference": worst, "texts": len(texts)}
    return {"versions": versions(python, "lm_eval", "torch", "transformers"), **counts}


def tasks_of_lm_eval() -> dict[str, str]:
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(HERE / "clients" / "lm_eval_choices.json")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]}
    text = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
    text |= {"metric_list": [{"metric": "exact_match"}]}
    text |= {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}}
    tasks = {"local_choice": choice, "local_text": text}
    # JSON is YAML, too.
    return {name: json.dumps({"task": name} | common | task) for name, task in tasks.items()}


def newest(out: Path, task: str) -> Path:
    return sorted(out.rglob(f"samples_{task}_*.jsonl"), key=lambda path: path.stat().st_mtime)[-1]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def likelihoods(path: Path) -> dict[tuple[str, str], tuple[float, bool]]:
    """By text and ending: the sum that lm-eval found, and whether every token was the likeliest."""
    found = {}
    for line in lines(path):
        for asked, [[value, greedy]] in zip(line["arguments"].values(), line["resps"]):
            found[asked["arg_0"], asked["arg_1"]] = float(value), greedy == "True"
    return found


@functools.cache
def engine() -> Any:
    """The tiny pair in this process."""
    from jaxspec import Engine

    return Engine.from_pretrained(
        PAIR / "target", PAIR / "draft", dtype="float32", max_batch=1, max_model_len=CONTEXT
    )


def likelihood(text: str, end: str) -> tuple[float, bool]:
    """The same values from the engine in this process."""
    encode = lambda one: engine().tokenizer.encode(one, add_special_tokens=True)
    ids, begin = encode(text + end), len(encode(text))
    known = engine().generate(ids, max_tokens=0, prompt_logprobs=1).prompt_logprobs
    pairs = [(known[at][ids[at]], max(known[at].values())) for at in range(begin, len(ids))]
    return sum(own for own, _ in pairs), all(own == best for own, best in pairs)


def prompts() -> list[str]:
    documents = json.loads((HERE / "clients" / "lm_eval_choices.json").read_text())
    return [document["text"] for document in documents]


def text_of(prompt: str) -> str:
    return engine().generate(prompt, max_tokens=12, stop="\n\n").text


def schemathesis(folder: Path, url: str) -> dict[str, Any]:
    """Checks that random requests that fit the description get answers that fit it."""
    python = environment_with(folder, "schemathesis", "schemathesis")
    command = [str(python.with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--max-examples", "40", "--phases", "fuzzing"]
    # In the folder, because it keeps files of its own beside where it runs.
    said = run([*command, "--request-timeout", "120", "--seed", "1"], cwd=folder)
    [cases] = re.findall(r"(\d+) generated, \d+ passed", said)
    [routes] = re.findall(r"(\d+) selected / \d+ total", said)
    used = versions(python, "schemathesis", "hypothesis")
    return {"versions": used, "routes": int(routes), "requests": int(cases)}


def ray(folder: Path, url: str) -> dict[str, Any]:
    """Checks that two replicas of `examples/ray_serve.py` under Ray Serve share the requests."""
    del url  # Ray's replicas are servers of their own
    python = environment_with(folder, "ray", "ray[serve]", f"{HERE.parent}[serve]")
    helper = [str(python), str(HERE / "clients" / "ray_replicas.py"), str(PAIR), str(TOKENS)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    seen = json.loads(run([*helper, *prompts()], env=environment).splitlines()[-1])
    expected = [engine().generate(one, max_tokens=TOKENS).text for one in prompts()]
    check(all(texts == expected for texts in seen["texts"]), f"replicas answered {seen}")
    check(len(seen["answered"]) == 2 and min(seen["answered"]) > 0, f"one replica only: {seen}")
    return {"versions": versions(python, "ray"), "answered_by_each": seen["answered"]}


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise LoadError(otherwise)


CLIENTS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "openai": openai,
    "vllm_bench": vllm_bench,
    "lm_eval": lm_eval,
    "schemathesis": schemathesis,
    "ray": ray,
}

if __name__ == "__main__":
    sys.exit(cli.run(main))
