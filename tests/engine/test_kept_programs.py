"""Compiled programs that are kept for the next process."""

import dataclasses
import functools
import logging
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from golden_pair import budget, golden_engine, opened, trajectories

from jaxspec.engine.programs import fingerprint as fingerprints
from jaxspec.engine.programs import store
from jaxspec.engine.programs.files import open_files
from jaxspec.engine.programs.fingerprint import fingerprint
from jaxspec.engine.programs.folder import cache_folder
from jaxspec.engine.setup import kernels_used
from jaxspec.engine.step import compiled
from jaxspec.engine.step.io import Drafting
from jaxspec.layers import linear
from jaxspec.models.qwen3 import Qwen3
from pallas_kernels.kept import call as kernels_kept
from pallas_kernels.kept import keep_lowered_kernels

PROMPT = trajectories()[0]["prompt"]
ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("compiles_anew")


def forget_programs() -> None:
    """What a new process does not know."""
    compiled._SHARED.clear()


class Untraceable(dict):
    """In place of the functions that are traced."""

    def __missing__(self, step):
        raise AssertionError(f"{step.__name__} was traced")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache folder with the programs of one request, and the tokens of that request."""
    folder = tmp_path_factory.mktemp("cache")
    forget_programs()
    engine = golden_engine(cache_dir=str(folder))
    tokens = engine.generate(PROMPT, budget(12)).token_ids
    yield folder, tokens
    forget_programs()


def test_a_second_process_traces_and_compiles_nothing(kept, monkeypatch):
    folder, tokens = kept
    forget_programs()
    monkeypatch.setattr(compiled, "JITTED", Untraceable())
    monkeypatch.setattr(jax.stages.Traced, "lower", lambda traced: pytest.fail("lowered"))
    monkeypatch.setattr(kernels_used, "kernel_uses", lambda *_: pytest.fail("rules were asked"))
    monkeypatch.setattr(store, "find_lapack", lambda: pytest.fail("no program calls it"))
    engine = golden_engine(cache_dir=str(folder))
    assert engine.warm_up([PROMPT]) >= 3
    assert engine.generate(PROMPT, budget(12)).token_ids == tokens


SOLVES = """
import sys, jax, jax.numpy as jnp
from jaxspec.engine.programs.store import open_store
store, made = open_store(sys.argv[1]), []
lower, right = jnp.array([[[2.0, 0], [1, 4]]]), jnp.array([[[6.0], [11]]])
solve = lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
def make():
    made.append(solve)
    return jax.jit(solve).lower(lower, right).compile(), jax.eval_shape(solve, lower, right)
solved = store.load_or_make("solve", store.find("solve"), make)(lower, right)
print(len(made), solved.ravel().tolist())
"""


def test_a_loaded_program_may_solve_triangular_systems(tmp_path):
    """As reading a prompt does with states. Only a process that compiles knows LAPACK."""
    settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    for made in (1, 0):
        command = [sys.executable, "-c", SOLVES, str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.stdout == f"{made} [3.0, 2.0]\n", (run.returncode, run.stderr)


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE_DIR", str(tmp_path))
    assert golden_engine(cache_dir=False).loop.device.programs.store is None
    monkeypatch.setenv("JAXSPEC_CACHE_DIR", "")
    assert golden_engine().loop.device.programs.store is None
    assert list(tmp_path.iterdir()) == []


def test_the_option_goes_before_the_environment_and_that_before_the_user_s_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/users/cache")
    monkeypatch.delenv("JAXSPEC_CACHE_DIR")
    assert str(cache_folder()) == "/users/cache/jaxspec"
    monkeypatch.setenv("JAXSPEC_CACHE_DIR", "/named")
    assert str(cache_folder()) == "/named"
    assert str(cache_folder("/chosen")) == "/chosen"


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-9], lambda c: b"", lambda c: c[:99] + b"x" + c[100:]]
)
def test_a_damaged_program_is_one_line_and_compiled_again(kept, damage, caplog, tmp_path):
    folder, tokens = kept
    for path in (folder / "programs").iterdir():
        path.write_bytes(damage(path.read_bytes()))
    forget_programs()
    engine = golden_engine(cache_dir=str(folder))
    with caplog.at_level(logging.WARNING, "jaxspec"):
        assert engine.generate(PROMPT, budget(12)).token_ids == tokens
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    damaged = [record.getMessage() for record in warnings]
    assert damaged and all("cannot be used: its checksum is wrong" in one for one in damaged)
    assert len(set(damaged)) == len(damaged), "a file was found damaged twice"
    forget_programs()
    caplog.clear()
    golden_engine(cache_dir=str(folder)).generate(PROMPT, budget(12))
    assert not caplog.records


def test_threads_that_need_one_program_make_it_once(monkeypatch):
    made = []
    load = compiled.Program.load_or_compile
    monkeypatch.setattr(
        compiled.Program, "load_or_compile", lambda one: (made.append(one.name), load(one))[1]
    )
    forget_programs()
    engine = golden_engine()
    programs = list(engine.programs(draws=False, only_needed=True))
    threads = [
        threading.Thread(target=program.make)
        for _ in range(3)
        for program in programs
        if program.name == "admit_step"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["admit_step"]


def test_a_program_that_failed_to_compile_is_tried_again(monkeypatch):
    forget_programs()
    engine, load = golden_engine(), compiled.Program.load_or_compile
    fails = iter([True])

    def once(program):
        if next(fails, False):
            raise MemoryError("no room to compile")
        return load(program)

    monkeypatch.setattr(compiled.Program, "load_or_compile", once)
    admit = next(iter(engine.programs(draws=False)))
    with pytest.raises(MemoryError):
        admit.make()
    assert not admit.is_ready
    admit.make()
    assert admit.is_ready


class TestFiles:
    def test_the_oldest_files_go_when_the_limit_is_reached(self, tmp_path):
        files = open_files(tmp_path / "files", limit_bytes=500)
        for name in "abc":
            files.write(name, bytes(100))
        assert files.read("a") == bytes(100)  # used last
        for age, name in enumerate("acb"):
            os.utime(files.folder / name, (1000 - age, 1000 - age))
        files.write("d", bytes(100))
        assert sorted(path.name for path in files.folder.iterdir()) == ["a", "c", "d"]

    def test_a_folder_that_others_can_write_to_is_not_used(self, tmp_path, caplog):
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        assert open_files(folder, 100) is None
        assert "other users can write to" in caplog.text

    def test_a_folder_that_cannot_be_made_is_one_line(self, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        assert open_files(tmp_path / "file" / "folder", 100) is None
        assert len(caplog.records) == 1

    def test_a_reader_never_sees_half_a_file(self, tmp_path, caplog):
        files = open_files(tmp_path / "files", limit_bytes=1 << 30)
        contents = {bytes([value]) * 200_000 for value in range(4)}

        def write(content):
            for _ in range(20):
                files.write("one", content)

        threads = [threading.Thread(target=write, args=[content]) for content in contents]
        for thread in threads:
            thread.start()
        seen = {files.read("one") for _ in range(200)} - {None}
        for thread in threads:
            thread.join()
        assert files.read("one") in contents and seen <= contents
        assert [path.name for path in files.folder.iterdir()] == ["one"]
        assert not caplog.records

    def test_a_full_disk_is_one_line(self, tmp_path, monkeypatch, caplog):
        files = open_files(tmp_path / "files", limit_bytes=1 << 30)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.replace", full)
        files.write("one", b"content")
        assert "No space left on device" in caplog.text
        assert list(files.folder.iterdir()) == []


class TestFingerprint:
    """Everything that decides a program changes its fingerprint."""

    STATIC = {"drafting": Drafting(0, 4), "draws": False}
    SHAPES = (jax.ShapeDtypeStruct((4,), "int32"),)

    def of(self, step="decode_step", models=None, static=None, shapes=None):
        models = models or opened().models
        return fingerprint(step, models, static or self.STATIC, shapes or self.SHAPES)

    def test_it_is_the_same_for_the_same_program(self):
        twin = dataclasses.replace(opened().models)
        assert self.of() == self.of(models=twin)
        assert len(self.of()) == 64

    @pytest.mark.parametrize(
        "changed",
        [
            {"step": "prefill_step"},
            {"static": {"drafting": Drafting(0, 5), "draws": False}},
            {"static": {"drafting": Drafting(0, 4), "draws": True}},
            {"shapes": (jax.ShapeDtypeStruct((8,), "int32"),)},
            {"shapes": (jax.ShapeDtypeStruct((4,), "int16"),)},
        ],
    )
    def test_step_static_arguments_and_shapes(self, changed):
        assert self.of(**changed) != self.of()

    def test_models(self):
        models = opened().models
        assert self.of(models=dataclasses.replace(models, page_size=99)) != self.of()
        target = models.target
        geometry = dataclasses.replace(target.config.decoder, rms_norm_eps=0.25)
        config = dataclasses.replace(target.config, decoder=geometry)
        other = dataclasses.replace(models, target=dataclasses.replace(target, config=config))
        assert self.of(models=other) != self.of()

    def test_flags_and_settings(self, monkeypatch):
        before = self.of()
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=1")
        flagged = self.of()
        with jax.default_matmul_precision("highest"):
            precise = self.of()
        assert len({before, flagged, precise}) == 3

    def test_sources(self, monkeypatch):
        before = self.of()
        monkeypatch.setattr(fingerprints, "_sources", lambda: "an edited layer")
        assert self.of() != before

    def test_models_of_other_packages_are_not_kept(self):
        class Own(Qwen3):
            """A researcher's model: its source is not among those that are hashed."""

        target = opened().models.target
        own = Own(target.config, target.capture, target.dtype)
        assert self.of(models=dataclasses.replace(opened().models, target=own)) is None

    def test_kernels_and_dtype(self):
        models = opened().models
        target = models.target
        others = [
            dataclasses.replace(models, target=dataclasses.replace(target, implementation="xla")),
            dataclasses.replace(models, target=dataclasses.replace(target, dtype=jnp.bfloat16)),
        ]
        assert len({self.of(), *(self.of(models=other) for other in others)}) == 3

    def test_a_program_of_a_replaced_function_is_not_kept(self, monkeypatch, caplog, tmp_path):
        whole = linear.RMSNorm.__call__

        @functools.wraps(whole)
        def without_scale(self, x):
            return x

        monkeypatch.setattr(linear.RMSNorm, "__call__", without_scale)
        keep_lowered_kernels(open_files(tmp_path, 1 << 20))
        with caplog.at_level(logging.WARNING, "jaxspec"):
            assert self.of() is None
        assert kernels_kept._keeping.files is None, "a kernel of it would be kept"
        assert "RMSNorm.__call__ was replaced by another function" in caplog.text
        monkeypatch.undo()
        assert self.of() is not None


def test_engines_share_programs_only_under_equal_settings(kept):
    folder, _ = kept
    programs = lambda: golden_engine(cache_dir=str(folder)).loop.device.programs
    with jax.default_matmul_precision("highest"):
        precise = programs()
        assert programs() is precise
    assert programs() is not precise


WITH_THE_CACHE_OF_JAX = """
import jax
from golden_pair import budget, golden_engine, trajectories
from jaxspec.engine.step import compiled
prompt, tokens = trajectories()[0]["prompt"], []
for folder, reads in FOLDERS:
    compiled._SHARED.clear()
    if reads:
        jax.clear_caches()
    engine = golden_engine(method="none", cache_dir=folder)
    tokens.append(engine.generate(prompt, budget(3)).token_ids)
assert all(one == tokens[0] for one in tokens), tokens
"""


@pytest.mark.parametrize(
    "folders",
    [
        [(False, True), ("ours", True), ("ours", True)],
        [(False, True), (False, True), ("ours", False), ("ours", True)],
    ],
    ids=["when it is read", "later in the process that read it"],
)
def test_what_comes_out_of_the_cache_of_jax_is_not_kept_again(folders, tmp_path):
    """On a CPU such a program could be written and loaded, but not run."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "of jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "engine"))),
    }
    program = [sys.executable, "-c", WITH_THE_CACHE_OF_JAX.replace("FOLDERS", repr(folders))]
    subprocess.run(program, env=environment, cwd=tmp_path, check=True)
    assert any((tmp_path / "of jax").iterdir())
