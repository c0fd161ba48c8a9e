"""Compiles regions of a phase to fused kernels with Inductor, torch's code generator. Only this module uses its private
API.

Contract
    A compiled region computes its values up to rounding, for all sizes that torch's guards admit; guards that compiling
    adds are in the capture's shape environment. Results have the strides of the capture. Regions that Inductor refuses
    stay eager, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import BoxedBool
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton

from embrace_fx.runtime.lower.regions import Compiled, Region


def check_toolchain(devices: Collection[str]) -> None:
    """Raises `ValueError` if no C++ compiler works, or no Triton for a model with CUDA among its types of devices."""
    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise ValueError(
            f"backend='inductor' needs a C++ compiler, but none works: {error}. Install g++, set the environment "
            "variable CXX to a compiler, or use backend='eager'."
        ) from error
    if "cuda" in devices and not has_triton():
        raise ValueError(
            "backend='inductor' needs Triton, but no installed Triton works with this GPU. Install the version that "
            "this version of torch requires, or use backend='eager'."
        )


class RegionCompiler:
    """Compiles the regions of one program with Inductor. Equal regions are compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[str, Compiled] = {}
        self._captures_cuda_graphs = False

    def __call__(self, region: Region) -> Compiled | None:
        """Compiles a region; None, with a warning, if Inductor refuses it."""
        try:
            with (  # the graph contains the casts and the backward
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                return self._compile(region)
        except Exception as error:  # a code generator may raise any error; the region's ops then run eagerly
            reason = next(iter(str(error).strip().splitlines()), "no message")
            warnings.warn(
                f"Inductor cannot compile a region of {len(region.module.graph.nodes)} nodes: {type(error).__name__}: "
                f"{reason}. The region runs eagerly instead, with the same results, but more slowly.",
                stacklevel=2,
            )
            return None

    def begin_step(self) -> None:
        """Tells CUDA graphs that a forward begins, so that they may overwrite results of the last step."""
        if self._captures_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def _compile(self, region: Region) -> Compiled:
        """Compiles a region, or returns the compiled code of an equal region."""
        fake_mode = detect_fake_mode(_traced_tensors(region))
        assert fake_mode is not None
        if fake_mode.shape_env is not None:  # discard symbols left over from ops that passes have run
            fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()
        with fake_mode:
            traced = make_fx(region.module, select_decomp_table(), tracing_mode="real")(*region.inputs)
        cuda_graph = config.triton.cudagraphs and _is_capturable(region)
        key = f"{traced.code}{[_cache_key(value) for value in region.inputs]}{region.fixed}"
        # A CUDA graph reads fixed addresses, so equal regions cannot share one.
        if key in self._compiled and not cuda_graph:
            return self._compiled[key]
        self._captures_cuda_graphs |= cuda_graph
        output = traced.graph.output_node()
        assert isinstance(output.args[0], list | tuple)
        # Mark all outputs as user-visible, so that Inductor keeps their strides.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        with tracing(TracingContext(fake_mode)):
            compiled: Compiled = compile_fx_inner(
                traced,
                list(region.inputs),
                static_input_idxs=region.fixed,
                cudagraphs=BoxedBool(cuda_graph),
                is_inference=True,
            )
        self._compiled[key] = compiled
        return compiled


def _is_capturable(region: Region) -> bool:
    """Returns whether a CUDA graph can capture a region: all sizes are fixed, all tensors are on CUDA, and no result is
    read after the next replay, which may overwrite it.
    """
    values = _traced_tensors(region)
    sizes = (size for value in values for size in value.shape)
    return not region.kept and all(v.device.type == "cuda" for v in values) and all(type(s) is int for s in sizes)


def _traced_tensors(region: Region) -> list[Tensor]:
    """Returns the fake tensors of a region's nodes and inputs."""
    of_nodes = (node.meta.get("val") for node in region.module.graph.nodes)
    return [value for value in (*region.inputs, *of_nodes) if isinstance(value, Tensor)]


def _cache_key(value: Any) -> str:
    """Returns, as text, all properties of a region's input on which the compiled code depends."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
