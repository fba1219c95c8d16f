"""Which of several processes a command is, by its flags and by the environment."""

import pytest

from jaxspec.console.processes import FROM_ENVIRONMENT, Together, completed
from jaxspec.errors import UsageError
from jaxspec.generate import main


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in FROM_ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)


def test_without_flags_a_process_is_alone():
    assert completed(Together()) == Together()


def test_flags_come_before_the_environment(monkeypatch):
    for variable, value in zip(FROM_ENVIRONMENT.values(), ("a:1", "4", "3")):
        monkeypatch.setenv(variable, value)
    assert completed(Together()) == Together("a:1", 4, 3)
    assert completed(Together("b:2", process_id=0)) == Together("b:2", 4, 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (Together("a:1"), "--coordinator needs --num-processes and --process-id"),
        (Together("a:1", 2), "need --process-id, or JAX_PROCESS_ID in the environment"),
        (Together(None, 2, 0), "need --coordinator, or JAX_COORDINATOR_ADDRESS"),
        (Together("a:1", 2, 2), "--process-id is 2; expected 0 to 1"),
        (Together("a:1", 0, 0), "--num-processes is 0; expected at least 1"),
    ],
)
def test_half_of_it_is_refused(flags, told):
    with pytest.raises(UsageError, match=told):
        completed(flags)


def test_a_number_of_the_environment_must_be_one(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(UsageError, match="JAX_NUM_PROCESSES is 'two'; expected an integer"):
        completed(Together("a:1", None, 0))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "add --tensor-parallel-size with the number of all their devices"),
        (["--tensor-parallel-size", "2", "--compare"], "--compare is for one process"),
    ],
)
def test_what_processes_cannot_share_is_refused_before_they_meet(flags, told, capsys):
    together = ["--coordinator", "nowhere:1", "--num-processes", "2", "--process-id", "0"]
    assert main(["--prompt", "a", *together, *flags]) == 2
    assert told in capsys.readouterr().err
