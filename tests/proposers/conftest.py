"""The golden pair as the tests of the engine make it."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "engine"))
