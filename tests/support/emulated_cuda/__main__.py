"""Runs Python with emulated devices: `python -m tests.support.emulated_cuda --devices 2 -m pytest tests/gpu`.

It ends with the status of what it runs; with 1 where that ended well and something went wrong all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.emulated_cuda import environment
from tests.support.emulated_cuda.build import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.emulated_cuda", allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--jitter-us", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-stream", type=int, default=-1)
    parser.add_argument("--triton", action="store_true", help="run Triton's kernels, in its interpreter")
    given = sys.argv[1:]
    # Arguments from "-m" or "-c" on belong to the command.
    ends = next((k for k, each in enumerate(given) if each in ("-m", "-c")), len(given))
    own, command = parser.parse_args(given[:ends]), given[ends:]
    libraries = build()
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder) / "findings"
        found = environment(
            libraries,
            findings,
            devices=own.devices,
            jitter_us=own.jitter_us,
            seed=own.seed,
            slow_stream=own.slow_stream,
            triton=own.triton,
        )
        status = subprocess.run([sys.executable, *command], env=found, check=False).returncode
        text = findings.read_text(encoding="utf-8") if findings.exists() else ""
    if text:
        print(text, end="", file=sys.stderr)
    return status or int(bool(text))


if __name__ == "__main__":
    sys.exit(main())
