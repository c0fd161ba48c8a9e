"""`examples/resume.py` with ranks that die: `killed.py DIRECTORY STEPS RANK:STEP ...`, one death an attempt."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume.py"


def main(directory: str, steps: str, *deaths: str) -> None:
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    victim, at_step = map(int, deaths[attempt].split(":")) if attempt < len(deaths) else (-1, -1)

    def before_step(step: int) -> None:
        if rank == victim and step == at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    runpy.run_path(str(EXAMPLE))["train"](Path(directory), int(steps), before_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
