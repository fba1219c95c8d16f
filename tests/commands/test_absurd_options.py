"""Options of absurd sizes, and options that would do nothing: each is a line, before any work."""

import dataclasses
import json
import logging
import shutil

import jax
import pytest

from jaxspec import Engine, EngineOptions, cli, convert, generate, profile
from jaxspec.checkpoint.draft_config import draft_config_of
from jaxspec.checkpoint.entries import Entries
from jaxspec.console.models import NamedModels, chosen_models, in_words
from jaxspec.console.report import speculation_line
from jaxspec.demo import demo_pair
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.plan.sizes import log
from jaxspec.engine.setup import room
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.stats.acceptance import PooledStats, counts_of
from jaxspec.engine.step.io import Models
from jaxspec.errors import LoadError, UsageError

TARGET, DRAFTER = demo_pair()
WITHOUT_DRAFTER = ["--model", str(TARGET)]


@pytest.fixture(scope="module")
def pair() -> Opened:
    return open_models(TARGET, DRAFTER, dtype="float32")


def said(capsys) -> str:
    """The one line that a command said about its error."""
    out, err = capsys.readouterr()
    first = "running on ", "weights: "
    lines = [line for line in err.split("\n") if line and not line.startswith(first)]
    assert out == "" and len(lines) == 1 and lines[0].startswith("error: "), (out, err)
    assert len(lines[0]) < 6000  # the name of a file may be long
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--page-size", "10000000"], 1, "pages of 10000000 positions"),
        (["--num-pages", "1000000000"], 1, "1000000000 pages of 64 positions"),
        (["--max-batch", "10000000"], 1, "10000000 slots"),
        (["--max-batch", "1" + "0" * 400], 2, "max_batch is 1000"),
        (["--num-pages", "1" + "0" * 400], 2, "num_pages is 1000"),
        (["--page-size", str(2**31)], 2, "page_size is 2147483648"),
        (["--max-model-len", str(2**31)], 2, "max_model_len is 2147483648"),
        (["--num-drafts", "1000000000"], 0, ""),
        (
            ["--method", "ngram", "--num-drafts", "1000000000", *WITHOUT_DRAFTER],
            2,
            "num_drafts + 1",
        ),
        (["--block-size", "100000"], 2, "block_size is 100000; expected less than"),
        (["--block-size", "1000000000"], 2, "block_size is 1000000000; expected less than"),
        (["--block-size", "1"], 2, "block size 1: expected at least 2"),
        (["--block-size", "4", *WITHOUT_DRAFTER], 2, "block_size is 4 but no drafter"),
        (["--draft-revision", "main", *WITHOUT_DRAFTER], 2, "draft_revision is 'main' but no"),
        (
            ["--draft-revision", "main", *WITHOUT_DRAFTER, "--draft-model", str(DRAFTER)],
            2,
            "folder",
        ),
        (["--logprobs", "3"], 2, "--logprobs are written to --json"),
        (["--system-prompt", "be brief"], 2, "--system-prompt needs a chat template"),
        (["--enable-thinking"], 2, "--enable-thinking needs a chat template"),
        (["--system-prompt", "x", "--no-chat-template"], 2, "leave out --no-chat-template"),
        (["--max-tokens", str(10**400)], 2, "max_tokens is 1000"),
        (["--model", "a" * 5000], 1, "cannot be the name of a folder"),
        (["--prompt-file", "b" * 5000], 1, "cannot be read"),
        (["--json", "c" * 5000], 1, "File name too long"),
        (["--json", "a/" * 3000 + "b"], 1, "File name too long"),
        (["--profile-dir", "d" * 5000], 1, "cannot be made"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_generate_says(flags, code, message, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "warm_up", lambda *_: pytest.fail("compiling") if code else stop())
    assert generate.main(["--prompt", "a", *flags]) == (code or cli.INTERRUPTED)
    if code:
        assert message in said(capsys)


def stop():
    raise KeyboardInterrupt


def test_a_system_prompt_for_token_ids(capsys):
    assert generate.main(["--prompt-ids", "1,2", "--system-prompt", "x"]) == 2
    assert "--system-prompt is for prompts of text" in said(capsys)


def plan_of(pair, with_drafter=True, **options):
    models = pair.models if with_drafter else Models(pair.models.target)
    return plan_engine(models, EngineOptions(**options))[1]


@pytest.mark.parametrize("name", ["max_batch", "page_size", "num_pages", "max_model_len"])
@pytest.mark.parametrize("size", [2**31, 10**400, 2.5, True])
def test_a_size_is_an_integer_of_the_device(pair, name, size, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as users run
    with pytest.raises(UsageError, match=f"{name} is .*; expected an integer below"):
        plan_of(pair, **{name: size})


def test_a_block_that_fits_in_no_context(pair):
    config = pair.models.proposers[0].drafter.config
    positions = config.decoder.max_position_embeddings
    for block_size in positions, positions + 2048:
        longer = dataclasses.replace(config, block_size=block_size)
        drafter = dataclasses.replace(pair.models.proposers[0].drafter, config=longer)
        proposer = dataclasses.replace(pair.models.proposers[0], drafter=drafter)
        models = dataclasses.replace(pair.models, proposers=(proposer,))
        with pytest.raises(UsageError, match=f"is {block_size}; expected less than {positions}"):
            plan_engine(models, EngineOptions())


def test_a_state_that_is_larger_than_all_memory(pair, monkeypatch):
    monkeypatch.setattr(room, "_device_bytes", lambda: 10**6)
    with pytest.raises(LoadError, match="need .* GB, but the device has 0.0 GB; lower max_batch"):
        Engine.from_models(pair.models, pair.params, pair.tokenizer)


def test_a_pool_that_integers_cannot_count(pair, monkeypatch):
    monkeypatch.setattr(room, "_device_bytes", lambda: None)
    options = EngineOptions(num_pages=2**30, page_size=2)
    with pytest.raises(LoadError, match="more than the 2147483647 positions"):
        Engine.from_models(pair.models, pair.params, options=options)


@pytest.mark.parametrize("error", [MemoryError(), "RESOURCE_EXHAUSTED: Out of\nmemory"])
def test_memory_that_is_not_there_when_it_is_asked_for(pair, error, monkeypatch):
    def fails(*_):
        raise error if isinstance(error, Exception) else jax.errors.JaxRuntimeError(error)

    options = EngineOptions(max_model_len=64, num_pages=8)
    monkeypatch.setattr(room, "check_room", lambda *_: None)
    monkeypatch.setattr(room, "_empty", fails)
    monkeypatch.setattr("jaxspec.engine.setup.build.check_room", lambda *_: None)
    with pytest.raises(LoadError, match="do not fit into the memory left beside the weights"):
        Engine.from_models(pair.models, pair.params, options=options)


def test_other_errors_of_the_device_are_not_called_memory(pair, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(room, "_empty", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        room.new_state(pair.models, plan_of(pair))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, None),
        ({"adaptive": True}, None),
        ({"max_model_len": 100}, None),
        ({"max_model_len": 10**6}, "max_model_len is .*, as the drafter was made for no more"),
        ({"adaptive": True, "method": "ngram"}, "adaptive has no effect: there is no drafter"),
        ({"width": 4, "method": "none"}, "width has no effect: there is no drafter"),
        ({"memory_fraction": 0.5}, "memory_fraction has no effect: a CPU"),
        ({"memory_fraction": 0.5, "num_pages": 9}, "memory_fraction has no effect: num_pages"),
    ],
)
def test_what_has_no_effect_is_said_once(pair, options, line, caplog):
    with caplog.at_level(logging.WARNING, logger=log.name):
        plan_of(pair, **options)
    assert len(caplog.messages) == (line is not None)
    if line is not None:
        assert pytest.importorskip("re").search(line, caplog.messages[0])


def test_a_target_that_the_drafter_names_is_said(tmp_path):
    folder = shutil.copytree(DRAFTER, tmp_path / "drafter")
    named, drafter = "someone/target", NamedModels(draft_model=str(folder))
    entries = json.loads((folder / "config.json").read_text())
    if "speculators_config" not in entries:
        config = draft_config_of(Entries(entries, "config"))
        with pytest.raises(UsageError, match="does not name one"):
            chosen_models(drafter)
        assert config.target_path is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxspec.engine.setup.load_models.named_target", lambda *_: named)
        chosen = chosen_models(drafter)
    assert chosen.model == named
    assert in_words(drafter, chosen) == (
        f"{named}, the target that {folder} names (no --model given), in bfloat16"
    )


def test_only_places_that_were_drafted_are_printed():
    few = PooledStats(**counts_of([1, 2], [2, 2], most_drafts=15))
    assert speculation_line(few)[0].endswith("place 1 to 2: 0.50, 0.00")
    pooled = PooledStats(**counts_of([1, 3, 2], [7, 7, 2], most_drafts=15))
    [line] = speculation_line(pooled)
    assert line.endswith("share accepted at place 1 to 5: 0.67, 0.33, 0.00, 0.00, 0.00")


def test_a_folder_without_a_trace(tmp_path, capsys):
    assert profile.main([str(tmp_path)]) == 1
    assert "expected a folder that generate or bench wrote with --profile-dir" in said(capsys)


DESTINATIONS = {
    "of the system": ("/proc/jaxspec/orbax", "cannot be written"),
    "below a file": ("{file}/orbax", "cannot be written"),
    "too long": ("{folder}/" + "a" * 5000, "File name too long"),
    "a link to nowhere": ("{link}", "cannot be written"),
}


@pytest.mark.parametrize("name", DESTINATIONS)
def test_a_destination_that_cannot_be_made(tmp_path, name, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    path, message = DESTINATIONS[name]
    places = {key: tmp_path / key for key in ("file", "link")} | {"folder": tmp_path}
    assert convert.main([str(DRAFTER), path.format(**places)]) == 1
    assert message in said(capsys)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a\nb: 28")])
def test_a_disk_that_is_full(tmp_path, error, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr("jaxspec.checkpoint.conversion.save", fails)
    assert convert.main([str(DRAFTER), str(tmp_path / "orbax")]) == 1
    assert "cannot be written" in said(capsys) and not (tmp_path / "orbax").exists()


def test_memory_and_the_machine_s_errors_are_lines_of_any_command(capsys):
    def fails(error):
        raise error

    assert cli.run(lambda: fails(MemoryError())) == cli.FAILED
    assert "out of memory" in said(capsys)
    exhausted = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of\nmemory")
    assert cli.run(lambda: fails(exhausted)) == cli.FAILED
    assert "lower --max-batch" in said(capsys)
    assert cli.run(lambda: fails(PermissionError(13, "Permission denied", "x"))) == cli.FAILED
    assert "Permission denied: 'x'" in said(capsys)
    with pytest.raises(jax.errors.JaxRuntimeError):
        cli.run(lambda: fails(jax.errors.JaxRuntimeError("INTERNAL: bug")))
