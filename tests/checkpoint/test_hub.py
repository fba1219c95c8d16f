"""Folders, hub ids, and the message if a name is neither."""

import os
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxspec.checkpoint.hub import local_folder
from jaxspec.errors import LoadError, UsageError

COMMIT = "0123456789012345678901234567890123456789"


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert local_folder(tmp_path) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_folder("org/name").samefile(tmp_path / "org" / "name")
    assert local_folder("~/org").samefile(tmp_path / "org")


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(UsageError, match="revision 'main'"):
        local_folder(tmp_path, "main")


@pytest.mark.parametrize("source", ["/no/such", "./here", "../there", "~/x", "a/b/c"])
def test_no_such_folder(source):
    with pytest.raises(LoadError, match="no such folder"):
        local_folder(source)


@pytest.mark.parametrize("source", ["a b", "org/na me", "Qwen/Qwen3..8B", "org/", "x--y", "a:b"])
def test_no_hub_id(source):
    with pytest.raises(LoadError, match="neither a folder nor a hub id"):
        local_folder(source)


def test_nothing_named():
    with pytest.raises(UsageError, match="no model named"):
        local_folder("")


def test_a_file(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(LoadError, match="is a file"):
        local_folder(tmp_path / "model.safetensors")


def test_only_data_is_asked_for(monkeypatch, tmp_path):
    asked = {}

    def download(hub_id, **options):
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_folder("org/name", "v2") == tmp_path
    assert asked["hub_id"] == "org/name" and asked["revision"] == "v2"
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.txt", "*.jinja"}


def failing(kind, monkeypatch):
    """The hub's errors need a response to be made; only their type matters here."""

    def download(*_, **__):
        error = kind.__new__(kind)
        Exception.__init__(error, "first line\nsecond line")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (errors.RepositoryNotFoundError, "no such model on the hub"),
        (errors.GatedRepoError, "HF_TOKEN"),
        (errors.RevisionNotFoundError, "no revision v2"),
        (errors.LocalEntryNotFoundError, "hf download org/name"),
        (OSError, "cannot download"),
        (RuntimeError, "cannot download"),
    ],
)
def test_what_the_hub_says(monkeypatch, kind, named):
    failing(kind, monkeypatch)
    with pytest.raises(LoadError, match=named) as caught:
        local_folder("org/name", "v2")
    assert "\n" not in str(caught.value)


def offline(home, source):
    """In its own process, because the hub's library reads its variables when it is imported."""
    code = (
        "import sys; from jaxspec.checkpoint.hub import local_folder\n"
        "from jaxspec.errors import LoadError\n"
        "try: print(local_folder(sys.argv[1]))\n"
        "except LoadError as error: print('LoadError', error)"
    )
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    variables |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, source]
    return subprocess.run(command, env=variables, text=True, capture_output=True).stdout.strip()


def test_offline(tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert offline(tmp_path, "org/name") == str(snapshot)
    message = offline(tmp_path, "org/other")
    assert message.startswith("LoadError no folder org/other") and "HF_HUB_OFFLINE" in message
    assert str(tmp_path) in message and "\n" not in message
