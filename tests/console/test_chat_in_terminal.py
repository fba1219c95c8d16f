"""`jaxspec chat` in a terminal: Ctrl-C, Ctrl-D, commands. The engine is a stand-in that answers
without end, so that no test depends on when a key arrives."""

import pathlib
import re

import pytest

from console.terminal import in_terminal

ROOT = pathlib.Path(__file__).resolve().parents[2]
CTRL_C, CTRL_D = "\x03", "\x04"
WITH_A_STAND_IN = """
import sys, time, types
sys.path.insert(0, ROOT)
from jaxspec import chat
from jaxspec.console import opening, turns
from jaxspec.engine.event_stream import StreamEvent
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.stats.acceptance import RequestStats
from jaxspec.engine.step.device import Clock

class Engine:
    chat_template = None
    tokenizer = types.SimpleNamespace(encode=lambda text, add_special_tokens: [*text.encode()])
    max_model_len = 10_000
    is_compiling_ahead = True
    plan = types.SimpleNamespace(shapes=types.SimpleNamespace(width_for=lambda length: 64))
    loop = types.SimpleNamespace(device=types.SimpleNamespace(clock=Clock()))

    def close(self):
        print("closed", file=sys.stderr)

    def stream(self, prompts, params):
        text = bytes(prompts[0]).decode()
        if not text.endswith("for ever"):
            stats = RequestStats(prompt_tokens=1, generation_tokens=2, itl_s=(0.1,))
            output = RequestOutput((1,), (2, 3), "", "length", None, None, stats)
            yield StreamEvent(0, (2, 3), f"[read {text!r}]", output)
        while True:
            yield StreamEvent(0, (2,), "on ", None)
            time.sleep(0.01)

def stop_after_output(stream):
    for event in stream:
        yield event
        if event.output is not None:
            return

endless = Engine.stream
Engine.stream = lambda self, prompts, params: stop_after_output(endless(self, prompts, params))
opening.say_what_runs = lambda named, say, quiet, num_devices: named
opening.opened_engine = lambda chosen, options, say, quiet: Engine()
turns.warmed_up = lambda *_: None
sys.exit(chat.main(sys.argv[1:]))
""".replace("ROOT", repr(str(ROOT)))


def talk(*typed: tuple[str, str], flags: tuple[str, ...] = ()) -> tuple[int, str]:
    return in_terminal(["-c", WITH_A_STAND_IN, *flags], typed)


@pytest.fixture(scope="module")
def talked() -> tuple[int, str]:
    """One long conversation."""
    return talk(
        ("> ", "/help\r"),
        ("> ", "/rest\r"),
        ("> ", "first\r"),
        ("pass]", "go on for ever\r"),
        ("on on on ", CTRL_C),
        ("> ", "then\r"),
        ("pass]", "/reset\r"),
        ("> ", "two\\\r"),
        (". ", "lines\r"),
        ("pass]", "/system x\r"),
        ("> ", "/exit\r"),
    )


def test_it_says_that_the_model_is_no_chat_model(talked):
    assert "this model has no chat template, so it is no chat model" in talked[1]


def test_commands_are_answered(talked):
    code, shown = talked
    assert code == 0 and "forget what was said" in shown
    assert "no command /rest; did you mean /reset?" in shown
    assert "a model without a chat template has no system message" in shown


def test_ctrl_c_ends_the_answer_and_what_came_is_kept(talked):
    shown = talked[1]
    assert "(stopped)" in shown
    read = re.findall(r"\[read (.*?)\]\r?\n", shown)
    assert read[0] == "'first'"
    assert re.fullmatch(r"\"first\[read 'first'\]\\ngo on for ever(on )+\\nthen\"", read[1]), read


def test_a_reset_forgets_and_a_backslash_continues_the_line(talked):
    assert "[read 'two\\nlines']" in talked[1]


def test_statistics_are_dim(talked):
    assert re.search(r"\x1b\[2m\[2 tokens.*?1\.00 tokens per pass\]\x1b\[0m", talked[1])


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D])
def test_both_end_the_program_at_the_prompt(key):
    # If Ctrl-C comes between the prompt and the reading of keys, Python notices it at the next key.
    code, shown = talk(("> ", "hi\r"), ("hi']", ""), ("> ", f"{key}\r"), flags=("-q",))
    assert code == 0 and "Traceback" not in shown
    assert "tokens per pass" not in shown  # quiet


def test_a_wait_at_the_end_is_said(talked):
    assert re.search(r"waits for a program that is being compiled.*\r?\nclosed", talked[1])
