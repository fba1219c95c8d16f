"""Breaks the code in known ways, one at a time, and checks that a test fails each time.

    python scripts/mutate.py --json docs/results/mutations.json    all, some minutes
    python scripts/mutate.py --only verify-pos k-mail --json ...   some, the file's other rows stay

Each entry of scripts/mutations.json replaces a piece of code by a wrong one. Either a review of the
project once found that no test noticed this (`origin` is `audit`), or it resembles such a case
(`kin`). The mutation is made in a copy of the files that git tracks, and the entry's tests run
there. Before that the tests run on the unchanged copy, where they must pass. A mutation is killed
if a test fails, and survives if all pass. Anything else, such as code that cannot be imported,
proves nothing and counts as an error.
"""

import argparse
import collections
import dataclasses
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec import cli
from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.environment import code

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutations.json"
PASSED, FAILED = 0, 1
"""Exit codes of pytest."""
LONGEST_S = 900


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A piece of code, and the wrong code that replaces it."""

    id: str
    breaks: str
    """What is wrong with the new code."""
    file: str
    old: str
    """The code to replace, which occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Arguments for pytest: the tests that should fail."""
    origin: str
    """`audit` or `kin`."""

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if (found := text.count(self.old)) != 1:
            raise LoadError(f"{self.id}: {self.file} has its code {found} times, expected once")
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of a run of pytest."""

    code: int
    failed: str | None
    """The first test that failed."""
    seconds: float
    end: str
    """The last lines of the output."""


def mutations() -> list[Mutation]:
    entries = json.loads(LIST.read_text())["mutations"]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def copies(count: int) -> Iterator["queue.Queue[Path]"]:
    """Copies of the tracked files, as they are in the working tree."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    free: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="jaxspec-mutations-") as folder:
        for number in range(count):
            root = Path(folder, str(number))
            for name in filter(None, names):
                if (ROOT / name).exists():
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, root / name)
            free.put(root)
        yield free


def run_tests(root: Path, tests: Sequence[str]) -> Run:
    """Runs tests until the first one fails."""
    # No bytecode, because that of a mutated file could be used for the restored one of that second.
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    begin = time.perf_counter()
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=LONGEST_S
    )
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.M)
    seconds = time.perf_counter() - begin
    end = (done.stdout + done.stderr)[-2000:]
    return Run(done.returncode, failed and failed[1], round(seconds, 1), end)


def check_tests(free: "queue.Queue[Path]", tests: tuple[str, ...]) -> None:
    """Refuses tests that fail without a mutation."""
    root = free.get()
    run = run_tests(root, tests)
    free.put(root)
    print(f"without a mutation, {' '.join(tests)}: code {run.code}, {run.seconds} s", flush=True)
    if run.code != PASSED:
        raise LoadError(f"{' '.join(tests)} fail without a mutation:\n{run.end}")


def attempt(free: "queue.Queue[Path]", mutation: Mutation, commit: str) -> dict[str, Any]:
    """Runs the tests with a mutation, and returns its row of the report."""
    root = free.get()
    with mutation.applied(root):
        run = run_tests(root, mutation.tests)
    free.put(root)
    outcome = {PASSED: "survived", FAILED: "killed"}.get(run.code, "error")
    if outcome == "killed" and run.failed is None:
        outcome = "error"
    print(f"{mutation.id}: {outcome} ({run.failed}), {run.seconds} s", flush=True)
    if outcome == "error":
        print(run.end, flush=True)
    row = {name: getattr(mutation, name) for name in ("id", "origin", "breaks", "file")}
    return row | {"outcome": outcome, "failed": run.failed, "commit": commit}


def written(path: Path, rows: list[dict[str, Any]], versions: dict[str, Any]) -> None:
    """Writes the report. Rows that the file has already stay if they were not made again."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    by_id = {row["id"]: row for row in [*earlier, *rows]}
    ordered = [by_id[one.id] for one in mutations() if one.id in by_id]
    report = {
        "command": " ".join(["python", "scripts/mutate.py", *sys.argv[1:]]),
        "environment": versions | {"python": platform.python_version()},
        "counts": collections.Counter(row["outcome"] for row in ordered),
        "rows": ordered,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutations; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    return parser.parse_args()


def main() -> None:
    options, versions = parse(), code()
    every = mutations()
    if unknown := set(options.only or ()) - {mutation.id for mutation in every}:
        raise UsageError(f"no mutation {', '.join(sorted(unknown))} in {LIST.name}")
    chosen = [one for one in every if not options.only or one.id in options.only]
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:
        all_tests = list(dict.fromkeys(mutation.tests for mutation in chosen))
        list(pool.map(lambda tests: check_tests(free, tests), all_tests))
        rows = []
        for row in pool.map(lambda one: attempt(free, one, versions["commit"]), chosen):
            rows.append(row)
            if options.json is not None:
                written(options.json, rows, versions)
    counts = collections.Counter(row["outcome"] for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if counts["killed"] < len(rows):
        raise LoadError(f"{len(rows) - counts['killed']} of {len(rows)} mutations were not killed")


if __name__ == "__main__":
    sys.exit(cli.run(main))
