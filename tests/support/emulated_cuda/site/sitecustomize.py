"""Puts the emulated ops into every Python process that finds this folder on its path, its children included.

Triton is hidden, as on a machine without it, unless its interpreter was asked for, whose kernels wait for the device,
or what compiles kernels that nobody runs.
"""

import ctypes
import os
import sys
import warnings

if ops := os.environ.get("EMULATED_CUDA_OPS"):
    if not (os.environ.get("TRITON_INTERPRET") or os.environ.get("EMULATED_CUDA_COMPILES")):
        sys.modules["triton"] = None  # type: ignore[assignment]

    import torch

    assert torch.version.cuda is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about each replaced kernel
        ctypes.CDLL(ops).emulated_ops_install()
    if os.environ.get("EMULATED_CUDA_POISON"):
        path = os.environ["EMULATED_CUDA_ALLOCATOR"]
        allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "emulated_allocate", "emulated_free")
        record_stream = ctypes.cast(ctypes.CDLL(path).emulated_record_stream, ctypes.c_void_p).value
        allocator.allocator().set_record_stream_fn(record_stream)
        torch.cuda.memory.change_current_allocator(allocator)
