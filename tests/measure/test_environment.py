"""What a results file says of the code that ran."""

import subprocess

import pytest

import jaxspec
from jaxspec.measure import environment


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv(environment.COMMIT_VARIABLE, raising=False)


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit, and the function that runs git in it."""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    return tmp_path, git


def test_a_checkout_says_its_commit_and_whether_files_changed_since(checkout):
    folder, git = checkout
    commit = git("rev-parse", "HEAD")
    assert len(environment.commit(folder)) >= 7 and commit.startswith(environment.commit(folder))
    (folder / "file").write_text("two")
    assert environment.commit(folder) == f"{git('rev-parse', '--short', 'HEAD')}-dirty"


def test_an_installed_package_is_no_commit_of_the_checkout_around_it(checkout):
    folder, _ = checkout
    (folder / "site-packages").mkdir()
    installed = environment.commit(folder / "site-packages")
    assert installed == f"release {jaxspec.__version__}"


def test_the_variable_names_the_commit_of_a_copy_without_history(checkout, monkeypatch):
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc1234")
    assert environment.commit(checkout[0]) == "abc1234"
    assert environment.environment()["commit"] == "abc1234"


def test_without_git_it_is_a_release(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment.commit(checkout[0]) == f"release {jaxspec.__version__}"


def test_versions_are_recorded():
    versions = environment.environment()["versions"]
    assert versions["jaxspec"] == jaxspec.__version__
    assert {"jax", "jaxlib", "flax", "numpy"} <= set(versions)
