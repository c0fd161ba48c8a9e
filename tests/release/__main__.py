"""Builds wheel and sdist, installs the wheel in a new environment, and checks it as its user would. Needs no network.

python -m tests.release --output build/release
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER = Path(__file__).with_name("user.py")
NOT_PACKAGED = ("tests/", "benchmarks/", "examples/", "docs/", ".ci/")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Raises `RuntimeError` with what a command said, where it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed in {cwd}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(output: Path) -> Path:
    """The wheel; what it and the sdist hold is checked. Raises `RuntimeError` where they differ or hold too much."""
    pip = (sys.executable, "-m", "pip", "-qq", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools never removes old files from it
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    sdist = output / run(sys.executable, "-c", program, output).splitlines()[-1]
    run(*pip, "--wheel-dir", output, ROOT)
    run(*pip, "--wheel-dir", output / "from-sdist", sdist)
    (wheel,), (again,) = output.glob("*.whl"), (output / "from-sdist").glob("*.whl")
    names, names_again = (sorted(zipfile.ZipFile(each).namelist()) for each in (wheel, again))
    if names != names_again:
        raise RuntimeError(f"wheels of tree and sdist differ in {sorted(set(names) ^ set(names_again))}")
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    if surplus := [name for name in [*inside, *names] if name.startswith(NOT_PACKAGED)]:
        raise RuntimeError(f"the release has files outside the package: {surplus[:5]}")
    if missing := {"embrace_fx/py.typed", "embrace_fx/viz/page.html", "embrace_fx/passes/shard.py"} - set(names):
        raise RuntimeError(f"{wheel.name} lacks {sorted(missing)}")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """The interpreter of a new environment that has the wheel, and of the present one what the wheel needs."""
    run(sys.executable, "-m", "venv", "--without-pip", "--clear", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "-qq", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # The .pth file adds the folder to sys.path. Python ignores .pth files inside it, such as an editable embrace_fx.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def check(python: Path, output: Path, mypy: Sequence[str | Path]) -> list[str]:
    """What was found, a line each; from a folder where the source tree is not seen."""
    user = Path(shutil.copy(USER, output))
    where = run(python, "-c", "import embrace_fx; print(embrace_fx.__file__)", cwd=output).strip()
    if not Path(where).is_relative_to(python.parents[1]):
        raise RuntimeError(f"{where} is imported instead of the installed embrace_fx")
    found = [run(python.with_name("embrace-fx"), "--version", cwd=output).strip()]
    found.append(run(*mypy, "--python-executable", python, user, cwd=output).strip())
    found.append(run(python, user, cwd=output).strip())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "release")
    output = parser.parse_args().output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    wheel = build(output)
    python = install(wheel, output / "venv")
    mypy = (
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        ROOT / "build" / "mypy",
    )
    for line in check(python, output, mypy):
        print(line)
    print(f"{wheel.name} and its sdist are good")


if __name__ == "__main__":
    main()
