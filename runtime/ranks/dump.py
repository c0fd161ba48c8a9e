"""Writes a file with what a rank was doing when a collective broke: `compile(dump_to=)`."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

_KEPT = 100
"""Number of launches in a dump."""


def write_dump(directory: Path, rank: int, found: dict[str, Any], launched: dict[str, int]) -> None:
    """Writes `rank-N.json`.

    Args:
        found: further entries.
        launched: name of a launch -> the step of the last one, in the order of the last ones.
    """
    frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        names.get(ident, str(ident)): [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)]
        for ident, frame in frames.items()
    }
    content = {
        "rank": rank,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **found,
        "last_launches": [{"name": name, "step": step} for name, step in list(launched.items())[-_KEPT:]],
        "threads": stacks,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank-{rank}.json").write_text(json.dumps(content, indent=1))
    except OSError as error:
        print(f"embrace_fx: rank {rank} could not write its dump into {directory}: {error}", file=sys.stderr)
