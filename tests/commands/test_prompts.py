"""Prompts of a command, up to the token ids that an engine takes."""

import pytest

from jaxspec.console.prompts import PromptSources, chat_of, encoded, read_prompts
from jaxspec.errors import UsageError
from jaxspec.text.chat import open_chat_template

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture
def typed(tmp_path):
    """Standard input."""
    file = tmp_path / "typed"
    file.write_text("a\n")
    with file.open() as opened:
        yield opened


@pytest.fixture
def template(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return open_chat_template(tmp_path)


def test_a_prompt_is_what_the_user_says(template):
    assert chat_of(template)("hi") == "[user]hi"
    assert chat_of(template, system="")("hi") == "[user]hi"


def test_the_system_speaks_first_and_thinking_is_asked_for(template):
    assert chat_of(template, "be brief", True)("hi") == "[system]be brief[user]hi<think>"


def test_without_a_template_nothing_is_rendered():
    assert chat_of(None) is None and chat_of(None, "") is None
    with pytest.raises(UsageError, match="--system-prompt needs a chat template"):
        chat_of(None, "be brief")
    with pytest.raises(UsageError, match="--enable-thinking needs a chat template"):
        chat_of(None, enable_thinking=True)


def test_special_tokens_come_once_and_ids_stay():
    encode = lambda text, add_special_tokens: [len(text), int(add_special_tokens)]
    assert encoded(["abc", [7, 8]], None, encode) == [[3, 1], [7, 8]]
    assert encoded(["abc"], lambda prompt: f"<{prompt}>", encode) == [[5, 0]]


def test_sources_come_in_order(tmp_path, typed):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "b"}\n\n{"prompt": [1, 2]}\n')
    sources = PromptSources(("-",), str(file), ("3, 4",))
    assert read_prompts(sources, typed) == ["a\n", "b", [1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 1}', 'line 1: expected a JSON object with a "prompt"'),
        ('{"prompt": [1.5]}', "neither text nor a list of token ids"),
    ],
)
def test_a_line_that_is_no_prompt(line, said, tmp_path, typed):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match=said):
        read_prompts(PromptSources(file=str(file)), typed)
