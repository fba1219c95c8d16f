"""Makes the helpers of the engine's tests, such as the golden pair, importable here."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "engine"))
