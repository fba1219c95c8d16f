"""CONTRIBUTING.md: its commands are those of continuous integration, and its folders exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)\n```$", TEXT, re.M | re.S)
WRITES = re.compile(r"--(?:json|plot|profile-dir|dump-programs|out) ([\w./-]+)")


def test_style_and_types_are_those_of_continuous_integration():
    (block,) = [block for block in BLOCKS if "ruff check" in block]
    ran = (ROOT / ".ci" / "run").read_text()
    lines = [re.sub(r"^timeout \w+ ", "", line) for line in ran.splitlines()]
    assert len(block.splitlines()) == 3
    assert set(block.splitlines()) <= set(lines)


def test_every_folder_of_python_is_checked():
    (style,) = re.findall(r"ruff format --check (.*)", TEXT)
    (types,) = re.findall(r"-m pyright (.*)", TEXT)
    folders = {path.parent.name for path in ROOT.glob("[a-z]*/*.py") if path.parent.name != "tests"}
    assert folders == set(types.split()) == set(style.split()) - {"tests"}


def test_the_folders_of_the_table_are_the_folders_of_tests():
    named = set(re.findall(r"`(tests/\w+)`", TEXT))
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert named <= folders and len(named) >= 10


def test_what_the_commands_of_the_pages_write_is_ignored():
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
    written = {name for page in pages for name in WRITES.findall(commands(page))}
    assert {"bench.json", "bench.png", "profile.png", "drafter"} <= written
    assert {name.strip("/") for name in written if not name.startswith("docs/")} <= ignored


def commands(page: pathlib.Path) -> str:
    """Blocks that are marked as commands, and commands within a line."""
    text = page.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    return "\n".join([*blocks, *re.findall(r"`(python [^`]*)`", text)])
