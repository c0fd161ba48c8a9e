"""`import embrace_fx`: quick, complete, and clear where only the source tree is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import embrace_fx

ROOT = Path(__file__).parents[2]

MEASURE = """
import json, sys, time
import torch
start = time.process_time()
import embrace_fx
imported = time.process_time() - start
embrace_fx.compile, embrace_fx.Cluster, embrace_fx.Plan
print(json.dumps([imported, time.process_time() - start, sorted(sys.modules)]))
"""

HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")


def python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_importing_loads_no_compiler(tmp_path: Path) -> None:
    """Beyond torch, 0.01 s of one processor for the import and 0.2 s for its names; the bounds are generous."""
    done = python(MEASURE, tmp_path)
    assert done.returncode == 0, done.stderr
    import_s, names_s, modules = json.loads(done.stdout)
    assert not set(HEAVY) & set(modules)
    assert import_s < 0.3
    assert names_s < 1.0


@pytest.mark.parametrize("name", embrace_fx.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(embrace_fx, name) is not None
    assert name in dir(embrace_fx)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'kompile'"):
        embrace_fx.kompile  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    assert embrace_fx.__version__ == metadata.version("embrace-fx")


def test_a_source_tree_alone_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "embrace_fx", tmp_path / "embrace_fx")
    program = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; import embrace_fx"
    done = python(program, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: embrace_fx is not installed")
    assert "make env" in done.stderr.splitlines()[-1]
