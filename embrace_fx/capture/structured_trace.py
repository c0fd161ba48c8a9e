"""Writes graphs and reports to torch's structured trace, which `tlparse` reads."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._logging._internal import trace_log, trace_structured


def log_graph(name: str, module: fx.GraphModule) -> None:
    """Writes a graph as text to torch's structured trace."""
    log_text(name, lambda: module.print_readable(print_output=False, include_stride=False, include_device=False))


def log_text(name: str, text: Callable[[], str]) -> None:
    """Writes a report to torch's structured trace, the log for `tlparse`. Calls `text` to build the report only if the
    trace is enabled.

    Before the first report, torch's handler has no folder, and would build the text only to drop it.
    """
    if all(getattr(handler, "root_dir", "") is None for handler in trace_log.handlers):
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"embrace_fx_{name}", "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
