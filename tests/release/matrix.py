"""A short suite under every Python that is there and every torch that is supported: `make matrix`.

    python -m tests.release.matrix --output benchmarks/results
    python -m tests.release.matrix --only python3.13-torch2.15.0

Each torch from `OLDEST_TORCH` to the newest of the package registry, the last release of each minor version, runs
under the oldest Python; the oldest and the newest torch run under every other one. Environments are made by uv in
build/matrix, one at a time: each is gigabytes, and removed after its suite unless `--keep` is given. What the pairs
have in common stays in uv's cache there until the last pair is done.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
OLDEST_TORCH = (2, 11)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SUITE = ("tests/surface/test_import.py", "tests/capture/test_capture.py", "tests/training/test_training.py")
NEEDED = ("setuptools>=77", "pytest>=8.2", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest")


@dataclass(frozen=True)
class Pair:
    """A Python by its minor version, and a torch."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.torch}"


def torches() -> list[str]:
    """The last release of each minor version on the registry, the oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    newest: dict[tuple[int, int], tuple[int, str]] = {}
    for major, minor, patch in re.findall(r"\b(\d+)\.(\d+)\.(\d+)(?=[,\s])", said.partition("Available versions")[2]):
        key = int(major), int(minor)
        if key >= OLDEST_TORCH:
            newest[key] = max(newest.get(key, (-1, "")), (int(patch), f"{major}.{minor}.{patch}"))
    return [newest[key][1] for key in sorted(newest)]


def pairs(pythons: list[str], versions: list[str]) -> list[Pair]:
    """Every torch under the oldest Python, the oldest and the newest torch under the others.

    >>> [pair.name for pair in pairs(["3.11", "3.12"], ["2.11.0", "2.12.1", "2.13.0"])][2:]
    ['python3.11-torch2.13.0', 'python3.12-torch2.11.0', 'python3.12-torch2.13.0']
    """
    first, *others = pythons
    ends = dict.fromkeys((versions[0], versions[-1]))
    return [Pair(first, each) for each in versions] + [Pair(python, each) for python in others for each in ends]


def uv() -> Path:
    """Returns the path of the program uv, which is installed if necessary."""
    found = FOLDER / "uv" / "bin" / "uv"
    if not found.exists():
        subprocess.run([sys.executable, "-m", "pip", "-qq", "install", "--target", FOLDER / "uv", "uv"], check=True)
    return found


def pythons_here() -> dict[str, str]:
    """Returns the installed interpreters among `PYTHONS`, from the path or pyenv, by version."""
    found = {}
    for version in PYTHONS:
        by_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        for each in (shutil.which(f"python{version}"), *map(str, by_pyenv)):  # pyenv's shim on the path may not work
            if each and subprocess.run([each, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
                found[version] = each
                break
    return found


def environment(program: Path, interpreter: str, pair: Pair) -> Path:
    """The interpreter of an environment with the pair, and embrace_fx from the source tree.

    Raises:
        RuntimeError: it cannot be made; with what the installer said.
    """
    folder = FOLDER / pair.name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        made = [program, "venv", "--quiet", "--clear", "--no-python-downloads", "--python", interpreter, folder]
        install = [program, "pip", "install", "--quiet", "--python", python, f"torch=={pair.torch}", *NEEDED]
        for command in (made, install):
            _said([*map(str, command)])
        ready.touch()
    _said([*map(str, (program, "pip", "install", "--quiet", "--python", python, "--editable", ROOT))])
    return python


def _said(command: list[str]) -> str:
    variables = os.environ | {"UV_CACHE_DIR": str(FOLDER / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    return done.stdout


def verdict(python: Path, pair: Pair) -> str:
    """Returns pytest's last line, and the first failure if there is one."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:xdist", *SUITE]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    (FOLDER / f"{pair.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= ")) + (f"; {failed[:160]}" if failed else "")


def page(found: dict[Pair, str], date: str) -> str:
    """Returns a page with the verdicts."""
    rows = [f"| {pair.python} | {pair.torch} | {said.replace('|', '/')} |" for pair, said in found.items()]
    head = [
        f"# Pythons and torches, {date}",
        "",
        f"`make matrix`: {', '.join(f'`{each}`' for each in SUITE)} under each pair.",
        "",
        "| Python | torch | |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the page")
    parser.add_argument("--only", nargs="*", help="names of pairs, python3.13-torch2.15.0")
    parser.add_argument("--keep", action="store_true", help="leave the environments and the cache for another run")
    asked = parser.parse_args()
    program, interpreters = uv(), pythons_here()
    found: dict[Pair, str] = {}
    for pair in pairs(list(interpreters), torches()):
        if asked.only is not None and pair.name not in asked.only:
            continue
        try:
            found[pair] = verdict(environment(program, interpreters[pair.python], pair), pair)
        except RuntimeError as error:
            found[pair] = f"cannot be installed: {error}"
        finally:
            if not asked.keep:
                shutil.rmtree(FOLDER / pair.name, ignore_errors=True)
        print(f"{pair.name}: {found[pair]}", flush=True)
        if asked.output is not None:
            date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
            (asked.output / f"matrix-{date}.md").write_text(page(found, date), encoding="utf-8")
    if not asked.keep:
        shutil.rmtree(FOLDER / "cache", ignore_errors=True)


if __name__ == "__main__":
    main()
