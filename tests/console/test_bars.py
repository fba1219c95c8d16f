"""Bars and lines while something long runs."""

import pathlib
import subprocess
import sys

from console.terminal import in_terminal

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
WORK = f"""
import sys, threading
sys.path.insert(0, {ROOT!r})
from jaxspec.console.progress import THREAD, Bar, bar, bytes_in_words, seconds_in_words
drawn = threading.Event()
with bar("reading", "B", shown="-q" not in sys.argv) as report:
    report(0, 4_000_000)
    report(4_000_000, 4_000_000)
opened = Bar("making", grows=True)
draw, opened._draw = opened._draw, lambda: (draw(), drawn.set())
assert opened._bar.disable or drawn.wait(60), "the bar stands still"
opened.report(2, 2)
opened.close()
ours = [one for one in threading.enumerate() if one.name == THREAD]
print("done", len(ours), bytes_in_words(23_200_000), bytes_in_words(16_400_000_000),
      seconds_in_words(1.26), seconds_in_words(150.0))
"""
DONE = "done 0 23 MB 16.4 GB 1.3 s 2.5 min"


def test_a_terminal_shows_bars_that_move_and_leaves_none():
    code, shown = in_terminal(["-c", WORK])
    assert code == 0
    assert "reading   0%" in shown and "4.00M/4.00M" in shown
    assert "making [00:" in shown and "making: 2 of 2 ready [" in shown
    last_line = shown.strip().rpartition("\r")[2]
    assert last_line == DONE


def test_no_terminal_no_bar():
    run = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == (DONE, "")


def test_quiet_is_quiet():
    _, shown = in_terminal(["-c", WORK, "-q"])
    assert "reading" not in shown
