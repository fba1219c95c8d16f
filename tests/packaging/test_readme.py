"""The README's commands are the ones that are run."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"^```bash\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_first_command_generates():
    assert " -m jaxspec.generate " in COMMANDS[0]


def test_continuous_integration_runs_the_second_command():
    assert COMMANDS[-1] in (ROOT / ".ci" / "run").read_text().splitlines()
