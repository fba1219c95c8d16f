"""Settings and hooks of all tests. Imports neither jax nor the packages, because the hook that
checks shapes has to be installed before them."""

import collections
import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import pathlib
import shutil
import tempfile
import time
import typing

import pytest

CHECKED = "array shapes: checked by beartype through jaxtyping"
UNCHECKED = "array shapes: NOT CHECKED, beartype is not installed"
NO_SKIPS = "JAXSPEC_NO_SKIPS"
"""Environment variable that makes a skipped test a failure. Continuous integration sets it if
everything that tests need is installed."""

MOST_MAPPINGS = 25_000
"""Compiled programs are freed above this number of memory mappings. Linux allows a process 65,530
by default, a program for CPUs takes several, and XLA ends the process if it gets no more."""

BETWEEN_COUNTS_S = 1.0
"""Seconds between two counts of mappings. A count takes up to 30 ms, which is longer than most
tests, and what is compiled in a second adds few mappings."""

FOLDER_OF_THE_RUN = "JAXSPEC_TESTS_PROGRAMS"
"""Environment variable with the folder of the programs that the processes of one run share."""

LONG_FILES = (
    "test_measuring_scripts.py",
    "test_fp8_goldens.py",
    "test_dspark_goldens.py",
    "test_sweep.py",
    "test_eagle3_on_goldens.py",
    "test_on_goldens.py",
    "test_dspark_in_the_engine.py",
    "test_four_devices.py",
    "test_hybrid_pair.py",
    "test_hybrid_target.py",
    "test_hybrid_targets.py",
    "test_rejection.py",
    "test_hits_and_misses.py",
    "test_qwen35_parity.py",
)
"""The files that take longest, about a minute or more of an idle core."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ["JAXSPEC_CACHE_DIR"] = ""  # no run may depend on an earlier one
    if not wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Threads for the interpreted kernels' warpgroups, which wait for each other. Two thread
        # blocks of the chain have eight; with eight threads in all a run was once seen to hang.
        os.environ.setdefault("NPROC", "16")
        # Tiny models compile for longer than they run; this takes a third off the whole suite.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    else:
        share_the_gpu()
    share_programs(config)
    if has_beartype():
        import jaxtyping

        check_plain_functions_plainly()
        jaxtyping.install_import_hook(["jaxspec", "pallas_kernels"], "beartype.beartype")
        rebuild_records_unchecked()
    leave_time_to_hypothesis()


def pytest_report_header() -> str:
    return CHECKED if has_beartype() else UNCHECKED


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """With -m gpu, imports only files with GPU tests: these need only jax and pytest, and a GPU
    machine often has no more."""
    return True if wants_gpu(config) and not holds_gpu_tests(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        (long_tests_apart if wants_gpu(config) else long_files_first)(items)
    asked = [item for item in items if item.get_closest_marker("gpu")]
    if asked and not has_gpu():
        for item in asked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


def pytest_collection_finish() -> None:
    """Spares Python's garbage collector what was imported, which it would look through again and
    again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """On CPUs one process runs all tests of a file, because they share engines and compiled
    programs. Files begin in the order in which the processes collect them. Tests on a GPU share
    little, and a file has up to 60 of them, so there any process takes the next test."""
    from xdist.scheduler import LoadFileScheduling, LoadScheduling

    if config.getvalue("dist") != "load":
        return None
    if wants_gpu(config):
        config.option.maxschedchunk = 1
        return LoadScheduling(config, log)
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Ends the process if the GPU no longer works in it: a fault in a kernel spoils everything that
    its process does on the GPU afterwards. Another process takes the remaining tests. The report of
    the test has been sent; xdist adds that its process has ended."""
    done = yield
    config = item.config
    if hasattr(config, "workerinput") and wants_gpu(config) and not gpu_answers():
        os._exit(1)
    return done


_counted_at = 0.0
"""The time at which mappings were counted last."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Frees compiled programs before there are too many for the process."""
    global _counted_at
    if time.monotonic() - _counted_at < BETWEEN_COUNTS_S:
        return
    if num_mappings() > MOST_MAPPINGS:
        free_programs()
    _counted_at = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if without_gpu := [report for report in skipped if "no NVIDIA GPU" in str(report.longrepr)]:
        terminalreporter.section("GPU tests did not run", red=True, bold=True)
        terminalreporter.line(f"{len(without_gpu)} tests need an NVIDIA GPU; jax found none.")
    if forbidden := forbidden_skips(terminalreporter.config):
        terminalreporter.section(f"skipped, which {NO_SKIPS} forbids", red=True, bold=True)
        for report in forbidden:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Makes the run fail if GPU tests were asked for and there is no GPU, or if tests were skipped
    and the environment forbids it."""
    if exitstatus != pytest.ExitCode.OK:
        return
    if forbidden_skips(session.config) or (wants_gpu(session.config) and not has_gpu()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def long_files_first(items: list[pytest.Item]) -> None:
    """Sorts the files: first those that are known to be long, then those with slow tests, then
    those with many tests, so that no process is left alone with a long file at the end."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = collections.Counter(item.path for item in items)

    def place(path: pathlib.Path) -> tuple:
        return path.name not in LONG_FILES, -slow[path], -tests[path]

    files = {path: number for number, path in enumerate(sorted(tests, key=place))}
    items.sort(key=lambda item: files[item.path])


def long_tests_apart(items: list[pytest.Item]) -> None:
    """Puts a short test after each long one. Tests of whole models take longest, and processes take
    two tests at a time at the beginning."""
    long = [item for item in items if item.path.parent.name == "gpu"]
    short = [item for item in items if item not in long]
    pairs = [item for pair in zip(long, short) for item in pair]
    count = len(pairs) // 2
    items[:] = pairs + long[count:] + short[count:]


def check_plain_functions_plainly() -> None:
    """Lets beartype alone check the functions whose annotations name no shapes. jaxtyping would
    check their arguments twice in every call, and keep sizes of axes for them."""
    import beartype
    import jaxtyping

    of_shapes = jaxtyping.jaxtyped

    def checked(of, typechecker):
        if not inspect.isfunction(of) or any(map(may_name_shapes, of.__annotations__.values())):
            return of_shapes(of, typechecker=typechecker)
        plainly, settings = beartype.beartype(of), jaxtyping.config
        if plainly is of:  # nothing to check
            return of

        @functools.wraps(of)
        def call(*args, **kwargs):
            return (of if settings.jaxtyping_disable else plainly)(*args, **kwargs)

        # Named like beartype's own, by which `engine/programs/patches.py` knows checked calls.
        call.__code__ = call.__code__.replace(co_filename=plainly.__code__.co_filename)
        return call

    jaxtyping.jaxtyped = lambda *, typechecker: functools.partial(checked, typechecker=typechecker)


def may_name_shapes(annotation: object) -> bool:
    """Whether jaxtyping has to check it. It may have to if the annotation is a string, or has one
    inside, because the name in it need not exist yet."""
    if isinstance(annotation, (str, typing.ForwardRef)):
        return True
    if getattr(annotation, "__module__", "").startswith("jaxtyping"):
        return True
    inside = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return any(map(may_name_shapes, inside))


def rebuild_records_unchecked() -> None:
    """Makes JAX rebuild records without checking them, because it does so also with shapes, host
    arrays and objects of its own as fields. Records that our code makes are checked."""
    import jax

    as_before = jax.tree_util.register_dataclass

    def register(record: type, *given, **options) -> type:
        if not record.__module__.startswith(("jaxspec.", "pallas_kernels.")):
            return as_before(record, *given, **options)
        fields = dataclasses.fields(record)
        static = [field.name for field in fields if field.metadata.get("static")]
        names = [field.name for field in fields if field.name not in static]

        def flatten(value):
            children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in names]
            return children, tuple(getattr(value, name) for name in static)

        def unflatten(static_values, children):
            value = object.__new__(record)
            for name, child in zip((*names, *static), (*children, *static_values)):
                object.__setattr__(value, name, child)
            return value

        jax.tree_util.register_pytree_with_keys(record, flatten, unflatten)
        return record

    jax.tree_util.register_dataclass = register


def share_the_gpu() -> None:
    """Lets many processes use the GPU at once. Each allocates memory when it needs it, and computes
    expected results on one core. Processes that this one starts inherit these settings."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def share_programs(config: pytest.Config) -> None:
    """Makes the processes of a run share their compiled programs, so that equal ones are compiled
    once. The folder begins empty and is removed, so no run depends on an earlier one."""
    if os.environ.get(FOLDER_OF_THE_RUN):
        return  # the folder of the process that started this one
    folder = tempfile.mkdtemp(prefix="jaxspec-tests-")
    os.environ[FOLDER_OF_THE_RUN] = os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    config.add_cleanup(lambda: forget_shared(folder))


def forget_shared(folder: str) -> None:
    for name in (FOLDER_OF_THE_RUN, "JAX_COMPILATION_CACHE_DIR"):
        os.environ.pop(name, None)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def compiles_anew():
    """For tests about compiling: switches off the shared folder, and frees programs that came from
    it, because on a CPU a program that jax has read cannot be written again."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    def switch(on: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()  # otherwise jax keeps its old choice

    before = jax.config.jax_enable_compilation_cache
    switch(False)
    free_programs()
    yield
    switch(before)


def num_mappings() -> int:
    """How many memory mappings this process has; 0 if the system does not say."""
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def free_programs() -> None:
    """Frees compiled programs. Those that are still referenced stay; the others are compiled again
    when they are needed."""
    import jax

    from jaxspec.engine.step import compiled

    compiled._SHARED.clear()
    jax.clear_caches()


def wants_gpu(config: pytest.Config) -> bool:
    asked = config.option.markexpr
    return "gpu" in asked and "not gpu" not in asked


def has_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def gpu_answers() -> bool:
    """Whether numbers come back from the GPU as they were sent."""
    import jax
    import numpy as np

    sent = np.arange(4)
    try:
        return bool((np.asarray(jax.device_put(sent)) == sent).all())
    except Exception:  # after any error this process can compute nothing
        return False


def forbidden_skips(config: pytest.Config) -> list[pytest.TestReport]:
    """The tests that were skipped, if the environment forbids that."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get(NO_SKIPS) or reporter is None:
        return []
    return reporter.stats.get("skipped", [])


def leave_time_to_hypothesis() -> None:
    """Removes the deadline of hypothesis's examples, because their time depends on what else the
    machine does. GPU machines often have no hypothesis."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
    settings.load_profile("any machine")


def has_beartype() -> bool:
    return importlib.util.find_spec("beartype") is not None


def holds_gpu_tests(path: pathlib.Path) -> bool:
    """Whether a file or a folder has GPU tests. In a folder named `gpu`, all tests are."""
    files = [path] if path.is_file() else path.rglob("test_*.py")
    return any(file.parent.name == "gpu" or "mark.gpu" in file.read_text() for file in files)
