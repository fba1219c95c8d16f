"""Damaged folders, hostile templates and invalid chats are each refused in one clear line."""

import json
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest

from jaxspec.errors import LoadError, UsageError
from jaxspec.text.chat import open_chat_template, render_chat
from jaxspec.text.template_process import LONGEST_TEXT, TEMPLATES
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
ENDLESS = {
    "nested loops": TWO_LOOPS,
    "stopped clock": "{% set check_clock = 0 %}{% set environment = 0 %}" + TWO_LOOPS,
    "slow loop filter": TWO_LOOPS.replace("99999) %}{% end", "99999) if 0 %}{% end"),
    "doubling macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "power": "{{ (messages|length + 8) ** (9 ** 8) % 10 }}",
    "constant power": "{{ (9 ** (9 ** 8)) % 10 }}",
    "power of a power": "{{ ((9 ** (9 ** 7)) ** 99) % 10 }}",
    "division": "{{ 9 ** (9 ** 7) // (7 ** (9 ** 7)) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "long lipsum": "{{ lipsum(n=1, min=10**8, max=10**8 + 1) | length }}",
    "slice": "{{ [1] | slice(10**8) | list | length }}",
    "batch": "{{ 'ab' | batch(10**8, 'x') | list | length }}",
    "sum": "{{ ([range(99999)] * 99999) | map('sum') | sum }}",
    "nested joins": "{{ ([range(99999)] * 9999) | map('join') | map('length') | sum }}",
    "sum of lists": "{{ ([range(99999) | list] * 9999) | sum(start=[]) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_is_ended_at_its_deadline_whatever_it_computes(tmp_path, name):
    write_template(tmp_path, ENDLESS[name])

    def render():
        render_chat(open_chat_template(tmp_path, seconds=0.4), [USER], seconds=0.3)

    message = refusal(LoadError, render)
    assert "ran out of time" in message or "of memory" in message


MUCH = {
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "repeated data": "{{ (messages[0].content * 10**9) | length }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format filter": "{{ '%*d' | format(10**9, 1) }}",
    "replace": "{{ ('a' * 10**5) | replace('a', 'a' * 10**5) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10**9) }}",
    "indent": "{{ ('a\n' * 10**5) | indent(10**6) }}",
    "join": "{{ range(99999) | join('a' * 10**5) }}",
    "sixteen million": "{{ 'a' * (16 * 2**20 + 1) }}",
    "big number": "{{ 10 ** (10 ** 6) }}",
}


@pytest.mark.parametrize("name", MUCH)
def test_a_template_has_a_limit_on_its_memory_and_on_its_text(tmp_path, name):
    write_template(tmp_path, MUCH[name])
    render = lambda: render_chat(open_chat_template(tmp_path), [USER])
    with pytest.raises((LoadError, UsageError)) as caught:
        render()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800
    said = ("MiB of memory", "makes more than", "out of time", "cannot render", "sandbox", "jinja")
    assert any(words in message for words in said), message


UNSAFE = {
    "big range": "{% for i in range(10**9) %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes messages": "{{ messages.append(1) }}",
    "format walk": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "attr filter": "{{ (messages | attr('__class__')).__mro__ }}",
}


@pytest.mark.parametrize("name", UNSAFE)
def test_a_template_stays_in_its_sandbox(tmp_path, name):
    template = open_chat_template(write_template(tmp_path, UNSAFE[name]))
    chat = [dict(USER)]
    assert "leaves its sandbox" in refusal(LoadError, lambda: render_chat(template, chat))
    assert chat == [USER]


def test_the_next_template_is_rendered_after_one_was_ended(tmp_path):
    (tmp_path / "endless").mkdir()
    endless = open_chat_template(write_template(tmp_path / "endless", TWO_LOOPS))
    good = open_chat_template(write_template(tmp_path, "{{ messages[0].content }}"))
    for _ in range(2):
        assert "time" in refusal(LoadError, lambda: render_chat(endless, [USER], seconds=0.2))
        assert render_chat(good, [USER]) == render_chat(good, [USER]) == "hi"


def test_a_longest_text_is_rendered_whole(tmp_path):
    template = open_chat_template(write_template(tmp_path, "{{ messages[0].content * 2 }}"))
    long = "é" * (LONGEST_TEXT // 2)
    assert render_chat(template, [USER | {"content": long}]) == long * 2
    longer = [USER | {"content": long + "é"}]
    assert "makes more than" in refusal(LoadError, lambda: render_chat(template, longer))


class Thing:
    def __repr__(self):
        return "a\nthing"


def nested():
    endless = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Thing(), "hold a thing of type Thing; expected texts"),
        (b"hi", "of type bytes"),
        ({1, 2}, "of type set"),
        (nested(), "nested without end"),
    ],
)
def test_messages_are_plain_data(tmp_path, content, said):
    template = open_chat_template(write_template(tmp_path, "x"))
    assert said in refusal(UsageError, lambda: render_chat(template, [USER | {"content": content}]))


def test_a_chat_may_be_of_any_mapping_and_sequence(tmp_path):
    class Text(str):
        pass

    source = "{{ messages }}{{ messages[0].content is sequence }}"
    template = open_chat_template(write_template(tmp_path, source))
    chat = (MappingProxyType({"role": Text("user"), "content": (1, 2.5, None, True)}),)
    expected = "({'role': 'user', 'content': (1, 2.5, None, True)},)True"
    assert render_chat(template, chat) == expected


def test_text_that_is_no_unicode_comes_through(tmp_path):
    template = open_chat_template(write_template(tmp_path, "{{ messages[0].content }}"))
    assert render_chat(template, [USER | {"content": "\udc80"}]) == "\udc80"


def test_threads_take_turns(tmp_path):
    template = open_chat_template(write_template(tmp_path, "{{ messages[0].content }}"))
    render = lambda i: render_chat(template, [USER | {"content": f"{i}"}])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(render, range(40))) == [f"{i}" for i in range(40)]


def test_no_process_outlives_ours(tmp_path):
    """Neither after a normal end, nor if this process is killed while a template is rendered."""
    folder = write_template(tmp_path, TWO_LOOPS)
    code = (
        "import os, signal, sys, threading\n"
        "from jaxspec.text.chat import open_chat_template, render_chat\n"
        "from jaxspec.text.template_process import TEMPLATES\n"
        "template = open_chat_template(sys.argv[1])\n"
        "print(TEMPLATES._process.pid, flush=True)\n"
        "if sys.argv[2] == 'killed':\n"
        "    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "    render_chat(template, [{'role': 'user', 'content': 'hi'}], seconds=0.4)\n"
    )
    for ending in "normal", "killed":
        command = [sys.executable, "-c", code, str(folder), ending]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert run.returncode == (0 if ending == "normal" else -9), run.stderr
        assert run.stderr == ""
        until = time.monotonic() + 60
        while is_running(int(run.stdout)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_running(int(run.stdout))


def is_running(pid):
    """Whether a process runs, and is not only waiting for its parent to take note of its end."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_ends_the_process_and_the_next_chat_is_right(tmp_path):
    endless = open_chat_template(write_template(tmp_path, TWO_LOOPS))
    alarm = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            render_chat(endless, [USER])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    assert render_chat(open_chat_template(write_template(tmp_path, "good")), [USER]) == "good"


def test_a_process_that_cannot_be_started(tmp_path, monkeypatch):
    write_template(tmp_path, "x")
    TEMPLATES.close()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "did not start" in refusal(LoadError, lambda: open_chat_template(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "can be started" in refusal(LoadError, lambda: open_chat_template(tmp_path))


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
