"""What the log `jaxspec` tells those who use the library."""

import logging

from golden_pair import GOLDENS, HOUSE, budget, trajectories

from jaxspec import Engine

WAITS = "requests wait while programs are loaded or compiled"


def test_a_request_that_waits_for_programs_is_told_of_once(caplog):
    pair = GOLDENS / "a" / "target", GOLDENS / "a" / "draft"
    # A length that no other test has, so that the process has none of the programs.
    options = {**HOUSE, "max_model_len": 432, "method": "none", "dtype": "float32"}
    prompt = trajectories()[1]["prompt"]
    with caplog.at_level(logging.INFO, logger="jaxspec"):
        cold = Engine.from_pretrained(*pair, **options)
        cold.generate(prompt, budget(3))
        lines = [record.getMessage() for record in caplog.records if record.name == "jaxspec"]
        first = lines.index(next(line for line in lines if WAITS in line))
        assert sum(WAITS in line for line in lines) == 1
        made = [line for line in lines[first:] if " compiled in " in line]
        assert any("prefill_step" in line for line in made), "the line comes before the wait"
        caplog.clear()
        warm = Engine.from_pretrained(*pair, **options)
        warm.generate(prompt, budget(3))
        assert not any(WAITS in record.getMessage() for record in caplog.records)
