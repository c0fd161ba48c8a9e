"""Compiles the stand-ins, with the system's C++ compiler, against the headers of the torch that runs this.

libcudart.so.13   the runtime: devices, memory, streams, events, and the check of what orders them
libnccl.so.2      communicators and collectives
libcuda.so.1      what is loaded of the driver
libcudnn.so       what torch asks of cuDNN besides its ops
ops.so            the ops of ATen, put into their places by `site/sitecustomize.py`
allocator.so      an allocator for `torch.cuda.memory.CUDAPluggableAllocator`
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
OUTPUT = SOURCES.parents[2] / "build" / "emulated_cuda"

_RUNTIME = ("streams.cpp", "memory.cpp", "hazards.cpp", "devices.cpp", "times.cpp", "refused.cpp")
_NCCL = ("nccl.cpp", "nccl_messages.cpp", "nccl_times.cpp", "nccl_refused.cpp")
_OPS = ("ops.cpp", "ops_sizes.cpp", "ops_times.cpp", "ops_rnn.cpp")


def build(output: Path = OUTPUT) -> Path:
    """Compiles what has changed since it was last compiled; returns the folder of the libraries.

    Raises:
        RuntimeError: torch is no build for CUDA; the compiler fails.
    """
    packages = _packages()
    output.mkdir(parents=True, exist_ok=True)
    versions = output / "versions.map"
    versions.write_text("libcudart.so.13 { global: *; };\n", encoding="utf-8")
    cuda = [f"-I{packages / 'nvidia' / 'cu13' / 'include'}"]
    torch = [f"-I{packages / 'torch' / 'include'}", f"-I{packages / 'torch' / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{packages / 'torch' / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    soname = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}", "-lpthread", "-ldl"]
    runtime = [f"-L{output}", "-l:libcudart.so.13", "-lpthread"]
    _library(output / "libcudart.so.13", _RUNTIME, cuda, soname)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        works = [
            pool.submit(_library, output / "libnccl.so.2", _NCCL, cuda, [*runtime, "-Wl,-soname,libnccl.so.2"]),
            pool.submit(_library, output / "libcuda.so.1", ("driver.cpp",), [], ["-Wl,-soname,libcuda.so.1"]),
            pool.submit(_library, output / "libcudnn.so", ("cudnn.cpp",), [], []),
            pool.submit(_library, output / "allocator.so", ("allocator.cpp",), cuda, runtime),
            pool.submit(_library, output / "ops.so", _OPS, [*cuda, *torch], [*linked, *runtime]),
        ]
    for work in works:
        work.result()
    return output


def _packages() -> Path:
    import torch  # noqa: PLC0415

    if torch.version.cuda is None:
        raise RuntimeError(
            f"torch {torch.__version__} in {sys.prefix} is not a build for CUDA. Run make device-env, then run this "
            "with the interpreter of that environment."
        )
    return Path(torch.__file__).parents[1]


def _library(target: Path, sources: tuple[str, ...], includes: list[str], linked: list[str]) -> None:
    """Compiles a library, unless its sources, and all headers, are those that it was compiled from."""
    digest = hashlib.sha256(repr((includes, linked)).encode())
    for path in (*(SOURCES / each for each in sources), *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    stamp = target.with_name(f"{target.name}.digest")
    if target.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == digest.hexdigest():
        return
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", *includes]
    command = ["c++", *options, *(str(SOURCES / each) for each in sources), "-o", str(target), *linked]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{target.name} does not compile:\n{ended.stderr[-4000:]}")
    stamp.write_text(digest.hexdigest(), encoding="utf-8")
