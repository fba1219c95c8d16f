"""Prompts rendered from chats, against transformers' `apply_chat_template`."""

import json
import warnings
from datetime import datetime

import pytest

from jaxspec.text.chat import open_chat_template, render_chat

SYSTEM = {"role": "system", "content": "You are terse. <b>&\"'é日本"}
USER = {"role": "user", "content": "  What is 2+2?\n"}
ASSISTANT = {"role": "assistant", "content": "4"}
THOUGHT = {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\nIt is 4."}
REASONED = {"role": "assistant", "content": "It is 4.", "reasoning_content": "\nhm\n"}
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
CALLS = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [
        {"type": "function", "function": CALL},
        {"name": "clock", "arguments": '{"zone": "UTC"}'},
    ],
}
SILENT_CALL = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sky": "<clear>"}'}

CHATS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "only system": [SYSTEM],
    "turns": [SYSTEM, USER, ASSISTANT, USER, THOUGHT, USER],
    "thoughts are dropped from the past": [USER, THOUGHT, USER, REASONED, USER],
    "ends with a thought": [USER, THOUGHT],
    "ends with reasoning": [SYSTEM, USER, REASONED],
    "ends with an answer": [USER, ASSISTANT],
    "late system": [USER, ASSISTANT, SYSTEM, USER],
    "tool turn": [SYSTEM, USER, CALLS, RESULT, RESULT],
    "silent tool turn": [USER, SILENT_CALL, RESULT, REASONED, USER],
    "thought between tools": [USER, THOUGHT | {"tool_calls": [CALL]}, RESULT, CALLS, RESULT],
    "no content": [USER, {"role": "assistant"}, USER],
    "content in parts": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "<wind> & 天气", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": CALL}]


@pytest.fixture(scope="module")
def template(qwen_folder):
    return open_chat_template(qwen_folder)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["plain", "no tools", "tools"])
@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize("name", CHATS)
def test_equal_to_transformers(
    template, reference, name, enable_thinking, tools, add_generation_prompt
):
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    expected = reference.apply_chat_template(
        CHATS[name],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **thinking,
    )
    found = render_chat(
        template,
        CHATS[name],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )
    assert found == expected


def test_the_thinking_switch_is_visible(template):
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render_chat(template, [USER], enable_thinking=False).endswith(closed)
    assert render_chat(template, [USER], enable_thinking=True).endswith("<|im_start|>assistant\n")
    assert render_chat(template, [USER]) == render_chat(template, [USER], enable_thinking=True)


def test_prompt_ids_equal_transformers(qwen, template, reference):
    prompt = render_chat(template, CHATS["turns"], enable_thinking=False)
    expected = reference.apply_chat_template(
        CHATS["turns"], add_generation_prompt=True, enable_thinking=False
    )
    assert qwen.encode(prompt, add_special_tokens=False) == expected["input_ids"]


SNIPPETS = {
    "tojson": "{{ messages | tojson }}|{{ {'b': 'é<&>', 'a': 1} | tojson(indent=2) }}",
    "tojson options": "{{ {'b': 'é', 'a': 1} | tojson(true, 1, (',', ':'), sort_keys=true) }}",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}a{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ loop.index }}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "whitespace": "  {% if true %}\n  a\n  {% endif %}\n\n  {# c #}\nb\n",
    "macro": "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "recursive loop": "{% for x in [[1, [2]], [3]] recursive %}"
    "{{ x if x is number else loop(x) }}{% endfor %}",
    "loop filter and else": "{% for i in range(9) if i > 20 %}x{% else %}none{% endfor %}",
    "undefined": "{{ nothing }}{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
    "special tokens": "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}",
    "html": "{{ '<a>' }}{{ messages[0].content | upper }}",
}


def open_source(folder, source):
    folder.mkdir(exist_ok=True)
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return open_chat_template(folder)


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_dialect_is_that_of_transformers(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template
    expected, _ = render_jinja_template(
        conversations=[[SYSTEM, USER]],
        chat_template=SNIPPETS[name],
        add_generation_prompt=True,
        eos_token="</s>",
        pad_token="<pad>",
    )
    found = render_chat(open_source(tmp_path, SNIPPETS[name]), [SYSTEM, USER])
    assert [found] == expected


def test_todays_date_is_available(tmp_path):
    before = datetime.now().strftime("%Y-%m-%d")
    found = render_chat(open_source(tmp_path, "{{ strftime_now('%Y-%m-%d') }}"), [USER])
    assert found in (before, datetime.now().strftime("%Y-%m-%d"))


def test_the_template_file_wins_over_the_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert render_chat(open_chat_template(tmp_path), [USER]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render_chat(open_chat_template(tmp_path), [USER]) == "file"


@pytest.mark.parametrize("layout", ["list in the config", "folder of files"])
def test_a_template_named_tool_use_serves_tools(tmp_path, layout):
    if layout == "folder of files":
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{% broken")
    else:
        named = {"default": "plain", "tool_use": "tools", "rag": "{% broken"}
        entries = [{"name": name, "template": source} for name, source in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    template = open_chat_template(tmp_path)
    assert render_chat(template, [USER]) == "plain"
    assert render_chat(template, [USER], tools=TOOLS) == "tools"
    assert render_chat(template, [USER], tools=[]) == "tools"
