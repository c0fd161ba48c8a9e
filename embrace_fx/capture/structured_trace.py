"""Graphs and reports in torch's structured trace, where `tlparse` shows them."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._logging._internal import trace_log, trace_structured


def log_graph(name: str, module: fx.GraphModule) -> None:
    """Hands a graph's text to torch's structured trace, where `tlparse` shows it."""
    log_text(name, lambda: module.print_readable(print_output=False, include_stride=False, include_device=False))


def log_text(name: str, text: Callable[[], str]) -> None:
    """Hands a report to torch's structured trace, made only where somebody reads it.

    Torch's own handler stays without a folder until the first report, which it has made and drops.
    """
    if all(getattr(handler, "root_dir", "") is None for handler in trace_log.handlers):
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"embrace_fx_{name}", "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
