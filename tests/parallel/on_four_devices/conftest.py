"""Only a process with four devices collects these tests: `tests/parallel/test_four_devices.py`
starts one."""

import os
import pathlib
import sys

FOUR = "--xla_force_host_platform_device_count=4"

collect_ignore_glob = [] if FOUR in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
sys.path.append(str(pathlib.Path(__file__).parents[2] / "engine"))
