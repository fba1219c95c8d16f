"""A conversation: its turns, what the model reads of it, and the commands."""

import pytest

from jaxspec.console.conversation import Conversation, Document, Line, help_lines, parsed
from jaxspec.text.chat import open_chat_template

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def begin(tmp_path_factory) -> Conversation:
    folder = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Conversation(open_chat_template(folder), system="be brief")


def characters(text: str, add_special_tokens: bool) -> list[int]:
    assert not add_special_tokens, "a template writes them itself"
    return [*text.encode()]


def read(conversation: Conversation) -> str:
    return bytes(conversation.token_ids(characters)).decode()


def test_every_turn_reads_all_turns_before_it(begin):
    second = begin.asked("hi").answered("hello").asked("why?")
    assert read(second) == "[system]be brief[user]hi[assistant]hello[user]why?"
    assert read(begin.asked("hi")) == "[system]be brief[user]hi"  # records do not change


def test_a_reset_keeps_the_system_message_and_a_new_one_begins_anew(begin):
    talked = begin.asked("hi").answered("hello")
    assert read(talked.reset().asked("a")) == "[system]be brief[user]a"
    assert read(talked.with_system("be long").asked("a")) == "[system]be long[user]a"


def test_a_text_is_continued_on_a_new_line():
    ids = lambda text, add_special_tokens: [*text.encode()] if add_special_tokens else []
    text = Document().asked("import os").answered("\nimport re").asked("x = 1")
    assert bytes(text.token_ids(ids)) == b"import os\nimport re\nx = 1"
    assert Document("a\n").asked("b").text == "a\nb"
    assert text.reset() == Document()


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("hi there", Line("say", "hi there")),
        ("  ", Line("nothing")),
        ("/exit", Line("exit")),
        ("/quit", Line("exit")),
        (" /reset ", Line("reset")),
        ("/system be brief ", Line("system", "be brief")),
        ("/system", Line("system", "")),
        ("/?", Line("help")),
        ("/usr/bin/env is a path", Line("say", "/usr/bin/env is a path")),
        ("/", Line("say", "/")),
    ],
)
def test_what_a_line_means(line, meaning):
    assert parsed(line) == meaning


def test_an_unknown_command_is_answered_and_not_said():
    answer = parsed("/rest now")
    assert answer.kind == "unknown" and "did you mean /reset?" in answer.text


def test_help_names_every_command():
    text = "\n".join(help_lines())
    assert all(command in text for command in ("/help", "/reset", "/system", "/exit", "Ctrl-C"))
