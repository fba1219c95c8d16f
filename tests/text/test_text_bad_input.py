"""Damaged folders, hostile templates and invalid chats are each refused in one clear line."""

import json

import pytest

from jaxspec.errors import LoadError, UsageError
from jaxspec.text.chat import open_chat_template, render_chat
from jaxspec.text.tokenizer import open_tokenizer

USER = {"role": "user", "content": "hi"}


def refusal(kind, action):
    """The one-line message with which an action is refused."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_missing_tokenizer(tmp_path):
    assert "no tokenizer.json in" in refusal(LoadError, lambda: open_tokenizer(tmp_path))
    missing = tmp_path / "absent"
    assert str(missing) in refusal(LoadError, lambda: open_tokenizer(missing))


def broken_contents(good):
    return {
        "empty": b"",
        "truncated": good[:1000],
        "not JSON": b"<!doctype html>\n<html>404\n</html>",
        "git pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "not UTF-8": b"\xff\xfe" + good[:100],
        "a list": b"[]",
        "no model": b'{"version": "1.0"}',
        "unknown model": b'{"version": "1.0", "model": {"type": "Mystery"}}',
        "merge of unknown tokens": good.replace(b'"merges": [', b'"merges": [["zz9", "qq9"], '),
        "merge without a pair": good.replace(b'"merges": [', b'"merges": [["a"], '),
        "panic in the library": good.replace(
            b'"continuing_subword_prefix": ""', b'"continuing_subword_prefix": "##"'
        ),
        "id below zero": good.replace(b'"!": 0', b'"!": -1'),
        "other decoder": good.replace(
            b'"decoder": {"type": "ByteLevel"', b'"decoder": {"type": "Fuse"'
        ),
    }


@pytest.mark.parametrize("name", broken_contents(b""))
def test_broken_tokenizer_json(tmp_path, qwen_folder, name):
    good = (qwen_folder / "tokenizer.json").read_bytes()
    content = broken_contents(good)[name]
    assert content != good
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json" in refusal(LoadError, lambda: open_tokenizer(tmp_path))


CONFIGS = {
    "truncated": '{"eos_token": "<|im',
    "a list": "[]",
    "eos token is a number": '{"eos_token": 7}',
    "eos token without content": '{"eos_token": {"special": true}}',
    "added tokens in a list": '{"added_tokens_decoder": ["a"]}',
    "added token id is a word": '{"added_tokens_decoder": {"x": {"content": "y"}}}',
    "template is a number": '{"chat_template": 7}',
    "template entry without a name": '{"chat_template": [{"template": "x"}]}',
    "template text is a number": '{"chat_template": [{"name": "default", "template": 7}]}',
    "nested without end": "[" * 100_000,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_tokenizer_config(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text(CONFIGS[name])
    message = refusal(LoadError, lambda: open_chat_template(tmp_path))
    assert "tokenizer_config.json" in message


def test_tokenizer_config_that_contradicts_the_vocabulary(tmp_path, qwen_folder):
    (tmp_path / "tokenizer.json").symlink_to(qwen_folder / "tokenizer.json")
    claim = {"added_tokens_decoder": {"151643": {"content": "<|begin|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(claim))
    message = refusal(LoadError, lambda: open_tokenizer(tmp_path))
    assert "'<|begin|>'" in message and "'<|endoftext|>'" in message


def test_text_that_is_not_unicode(qwen):
    encode = lambda: qwen.encode("caf\udce9", add_special_tokens=False)
    assert "UTF-8" in refusal(UsageError, encode)


def write_template(folder, source):
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


def test_no_chat_template(tmp_path):
    message = refusal(LoadError, lambda: open_chat_template(tmp_path))
    assert "no chat template" in message and "--no-chat-template" in message


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ messages[",
        "{% frobnicate %}",
        "{{ messages | frobnicate }}",
        "{% generation %}",
        "{% break %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
    ids=["no end", "no bracket", "tag", "filter", "no endgeneration", "break", "deep"],
)
def test_template_with_a_syntax_error(tmp_path, source):
    write_template(tmp_path, source)
    assert "not valid jinja" in refusal(LoadError, lambda: open_chat_template(tmp_path))


def test_template_that_is_not_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in refusal(LoadError, lambda: open_chat_template(tmp_path))


TWO_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "nested loops": (TWO_LOOPS, "out of time"),
    "stopped clock": (
        "{% set check_clock = 0 %}{% set environment = 0 %}" + TWO_LOOPS,
        "out of time",
    ),
    "slow loop filter": (
        TWO_LOOPS.replace("99999) %}{% end", "99999) if 0 %}{% end"),
        "out of time",
    ),
    "doubling macro": (
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "out of time",
    ),
    "big range": ("{% for i in range(10**9) %}{% endfor %}", "leaves its sandbox"),
    "endless macro": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "leaves its sandbox",
    ),
    "class walk": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "leaves its sandbox"),
    "changes messages": ("{{ messages.append(1) }}", "leaves its sandbox"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template(tmp_path, name):
    source, expected = HOSTILE[name]
    template = open_chat_template(write_template(tmp_path, source))
    chat = [dict(USER)]
    assert expected in refusal(LoadError, lambda: render_chat(template, chat, seconds=0.3))
    assert chat == [USER]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ raise_exception('roles must\nalternate') }}",
            "refuses these messages: roles must alt",
        ),
        ("{{ 'a' + messages[0].content }}", "cannot render these messages (TypeError"),
        ("{{ nothing.at.all }}", "cannot render these messages (UndefinedError"),
        ("{{ 1 // 0 }}", "cannot render these messages (ZeroDivisionError"),
        ("{% include 'other' %}", "cannot render these messages (TypeError"),
        ("{{ strftime_now(7) }}", "cannot render these messages (TypeError"),
    ],
)
def test_template_that_raises(tmp_path, source, expected):
    template = open_chat_template(write_template(tmp_path, source))
    chat = [{"role": "user", "content": None}]
    assert expected in refusal(UsageError, lambda: render_chat(template, chat))


@pytest.mark.parametrize("chat", [[], [{"content": "hi"}], [USER, {}]])
def test_chat_without_messages_or_roles(tmp_path, chat):
    template = open_chat_template(write_template(tmp_path, "x"))
    assert "expected" in refusal(UsageError, lambda: render_chat(template, chat))
