"""Runs those cases of the early reviews again that fit into a command or a few lines of Python.

    python scripts/review_cases.py                 prints what each gives now
    python scripts/review_cases.py --check         compares that with docs/notes/review-cases.md

The page lists every case. A row whose last column is `run NAME` has what the case NAME prints in
its column "now", in backticks, up to the first semicolon. The other rows name tests.
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec import Engine, JaxspecError, SamplingParams, cli
from jaxspec.errors import LoadError
from jaxspec.text.chat import open_chat_template, render_chat

PAGE = Path(__file__).resolve().parents[1] / "docs" / "notes" / "review-cases.md"
RUN = re.compile(r"^\|[^|]*\|(?P<now>(?:[^|`]|`[^`]*`)*)\| run `(?P<name>[\w-]+)` \|$", re.M)
IMPORTS = "import os\n"
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@functools.cache
def engine() -> Engine:
    return Engine.from_pretrained(
        *jaxspec.demo_pair(), dtype="float32", max_batch=2, max_model_len=256, cache_dir=False
    )


def command(module: str, *arguments: str) -> str:
    """The exit code of a command, and the last line that it writes to standard error."""
    out, err = io.StringIO(), io.StringIO()
    main = importlib.import_module(f"jaxspec.{module}").main
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as end:  # of argparse
            code = end.code
    return f"{code}: {err.getvalue().strip().splitlines()[-1]}"


def refused(call: Callable[[], Any]) -> str:
    """The type and the message of the error that a call raises."""
    try:
        return f"not refused: {call()!r}"
    except JaxspecError as error:
        assert "\n" not in str(error)
        return f"{type(error).__name__}: {error}"


def prompt_of(prompt: Any) -> str:
    return refused(lambda: engine().generate(prompt, GREEDY))


def same_text(prompt: Any) -> str:
    """Says whether a prompt in another form is continued like the text."""
    one, other = engine().generate(prompt, GREEDY), engine().generate(IMPORTS, GREEDY)
    return "the tokens of the text" if one.token_ids == other.token_ids else "other tokens"


def ids_of(text: str) -> list[int]:
    tokenizer = engine().tokenizer
    assert tokenizer is not None, "the demo pair has one"
    return tokenizer.encode(text, add_special_tokens=True)


def tiny_top_p() -> str:
    drawn = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, top_p=1e-38, seed=1)
    one, other = engine().generate(IMPORTS, drawn), engine().generate(IMPORTS, GREEDY)
    return "the likeliest tokens" if one.token_ids == other.token_ids else f"{one.token_ids}"


def template(source: str) -> str:
    """The error message about a chat template."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "chat_template.jinja").write_text(source)
        chat = [{"role": "user", "content": "hi"}]
        said = refused(lambda: render_chat(open_chat_template(folder, seconds=1), chat, seconds=1))
        return said.replace(f"{folder}/", "").replace(folder, "FOLDER")


def with_config(change: Mapping[str, Any], remove: tuple[str, ...] = ()) -> str:
    """The error message about the demo target if entries of its config are changed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "target")
        shutil.copytree(jaxspec.demo_pair()[0], copy)
        config = json.loads((copy / "config.json").read_text()) | change
        kept = {key: value for key, value in config.items() if key not in remove}
        (copy / "config.json").write_text(json.dumps(kept))
        return command("generate", "--model", str(copy), "--prompt", "x").replace(f"{copy}", "DIR")


def without_trace() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return command("profile", folder).replace(folder, "DIR")


def line_of_prompts(text: str) -> str:
    """Says how many prompts are in a file with this text."""
    from jaxspec.console.prompts import PromptSources, read_prompts

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.txt")
        path.write_bytes(text.encode())
        return f"{len(read_prompts(PromptSources(file=str(path)), sys.stdin))} prompt"


def generate(*arguments: str) -> str:
    said = command("generate", "--prompt", "x", "--max-tokens", "1", *arguments)
    return re.sub(r"the device has [\d.]+ GB", "the device has N GB", said)


CASES: dict[str, Callable[[], str]] = {
    "prompt-dict": lambda: same_text({"prompt": IMPORTS}),
    "prompt-ids-dict": lambda: same_text({"prompt_token_ids": ids_of(IMPORTS)}),
    "other-dict": lambda: prompt_of({"a": 1}),
    "set-of-ids": lambda: prompt_of({1, 2}),
    "bool-as-id": lambda: prompt_of([True, 2]),
    "form-feed": lambda: line_of_prompts("a\x0cb\n"),
    "tiny-top-p": tiny_top_p,
    "template-power": lambda: template("{{ 9 ** 99999999 }}"),
    "template-power-of-messages": lambda: template("{{ (messages|length + 8) ** (9 ** 7) % 10 }}"),
    "template-lipsum": lambda: template("{{ lipsum(n=100000000) }}"),
    "template-repeat": lambda: template("{{ ('a' * 4000000000)|length }}"),
    "layers": lambda: with_config({"num_hidden_layers": 10**8}, ("layer_types",)),
    "rope-theta": lambda: with_config({"rope_theta": 10**400}),
    "page-size": lambda: generate("--page-size", "1000000000"),
    "num-pages": lambda: generate("--num-pages", "1000000000"),
    "max-batch": lambda: generate("--max-batch", "10000000"),
    "block-size": lambda: generate("--block-size", "100000"),
    "no-drafter": lambda: generate("--model", str(jaxspec.demo_pair()[0]), "--block-size", "8"),
    "logprobs-without-json": lambda: generate("--logprobs", "2"),
    "system-prompt": lambda: generate("--system-prompt", "x"),
    "kernels-demanded": lambda: generate("--kernels", "mosaic"),
    "unknown-option": lambda: refused(lambda: Engine.from_pretrained("x", max_seqs=3)),  # type: ignore[call-arg]
    "never-fits": lambda: refused(lambda: engine().generate("x", SamplingParams(max_tokens=5000))),
    "profile-without-trace": without_trace,
    "no-prompt": lambda: command("generate", "--prompt", ""),
}


def listed() -> dict[str, str]:
    """What the page says about each case."""
    rows = RUN.finditer(PAGE.read_text())
    return {row["name"]: " ".join(re.findall(r"`([^`]*)`", row["now"])) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the page")
    options = parser.parse_args()
    now = {}
    for name, case in CASES.items():
        now[name] = case().partition(";")[0]
        print(f"{name}: {now[name]}", flush=True)
    if options.check:
        page = listed()
        wrong = [name for name in now.keys() | page.keys() if now.get(name) != page.get(name)]
        if wrong:
            raise LoadError(f"{PAGE.name} says something else of {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(cli.run(main))
