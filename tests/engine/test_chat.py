"""Chats from Python: rendered by the model's template, then continued like any prompt."""

import shutil

import pytest
from fake_device import fake_engine
from golden_pair import GOLDENS, HOUSE, budget, golden_engine

from jaxspec import Engine, UsageError

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'nobody' %}{{ raise_exception('there is no such role') }}{% endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if tools %}<tools>{{ tools | length }}{% endif -%}
{%- if enable_thinking is defined %}<think>{{ enable_thinking }}{% endif -%}
{%- if style is defined %}<style>{{ style }}{% endif -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
ASKS = [{"role": "user", "content": "import"}]
TURNS = [{"role": "system", "content": "short"}, *ASKS]
REFUSED = [{"role": "nobody", "content": "x"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(GOLDENS / "a" / "target", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    draft = GOLDENS / "a" / "draft"
    return Engine.from_pretrained(folder, draft, dtype="float32", driver="overlapped", **HOUSE)


def test_a_chat_continues_what_its_template_renders(engine):
    answer = engine.chat(ASKS, max_tokens=9, ignore_eos=True)
    assert answer.prompt == "<user>import<assistant>"
    ids = engine.tokenizer.encode(answer.prompt, add_special_tokens=False)
    assert list(answer.prompt_token_ids) == ids
    assert answer.token_ids == engine.generate(ids, budget(9)).token_ids
    assert len(answer.token_ids) == 9


def test_several_chats_give_a_list_and_stream_in_their_order(engine):
    several = engine.chat([ASKS, TURNS], budget(7))
    assert [one.prompt for one in several] == [
        "<user>import<assistant>",
        "<system>short<user>import<assistant>",
    ]
    assert [one.text for one in engine.chat([ASKS], budget(7))] == [several[0].text]
    texts = ["", ""]
    for event in engine.stream_chat([ASKS, TURNS], budget(7)):
        texts[event.index] += event.text
    assert texts == [one.text for one in several]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"enable_thinking": False}, "<think>False<assistant>"),
        ({"enable_thinking": True}, "<think>True<assistant>"),
        ({"add_generation_prompt": False}, ""),
        ({"tools": [{"name": "a"}, {"name": "b"}]}, "<tools>2<assistant>"),
        ({"chat_template_kwargs": {"style": "terse"}}, "<style>terse<assistant>"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            "<think>False<assistant>",
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, ""),
    ],
)
def test_the_template_gets_its_variables(engine, options, end):
    assert engine.chat(ASKS, budget(1), **options).prompt == f"<user>import{end}"
    stream = engine.stream_chat(ASKS, budget(1), **options)
    assert [e.output.prompt for e in stream if e.output][0].endswith(f"import{end}")


def test_a_chat_that_the_template_refuses_is_refused_alone_if_asked_for(engine):
    with pytest.raises(UsageError, match="refuses these messages: there is no such role$"):
        engine.chat(REFUSED, budget(3))
    with pytest.raises(UsageError, match="^1 of 2 prompts can never run.*prompt 1: the chat"):
        engine.chat([ASKS, REFUSED], budget(3))
    good, bad = engine.chat([ASKS, REFUSED], budget(3), errors="return")
    assert good.error is None and len(good.token_ids) == 3
    assert bad.finish_reason == "error" and bad.error.endswith("there is no such role")
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("Why?", "of type str; expected .*generate\\(\\) continues plain text"),
        ({"role": "user", "content": "Why?"}, "of type dict; expected"),
        ([], "the chat has no messages"),
        ([ASKS, []], "prompt 1: the chat has no messages"),
        ([ASKS, [3]], "prompt 1: a message is 3; expected"),
        ([{"content": "Why?"}], "has the keys"),
        (3, "of type int; expected"),
    ],
)
def test_what_is_no_chat_is_refused_in_a_line(engine, messages, said, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as users run
    with pytest.raises(UsageError, match=said) as refusal:
        engine.chat(messages, max_tokens=3)
    assert "\n" not in str(refusal.value)


def test_messages_are_no_variable_of_the_template(engine):
    with pytest.raises(UsageError, match="give them as messages only"):
        engine.chat(ASKS, chat_template_kwargs={"messages": []}, max_tokens=3)


def test_without_a_template_or_a_tokenizer_a_chat_is_refused_in_a_line():
    for call in golden_engine().chat, golden_engine().stream_chat:
        with pytest.raises(UsageError, match="^the model has no chat template; .*use generate()"):
            call(ASKS, errors="return")
    with pytest.raises(UsageError, match="^the engine has no tokenizer, which a chat needs"):
        fake_engine().chat(ASKS)


def test_a_submitted_chat_is_the_same_chat(engine):
    answer = engine.chat(TURNS, budget(6))
    id, events = engine.submit_chat(TURNS, budget(6)), []
    while not events or events[-1].output is None:
        events += engine.step([id])
    output = events[-1].output
    assert (output.prompt, output.token_ids) == (answer.prompt, answer.token_ids)
    assert output.prompt == engine.chat_prompt(TURNS).text
    with pytest.raises(UsageError, match="no such role"):
        engine.submit_chat(REFUSED)
    assert engine.num_waiting == engine.num_running == 0
