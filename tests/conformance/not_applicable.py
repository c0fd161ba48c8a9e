"""Why a body says nothing about a program that computes what DDP computes."""

from __future__ import annotations

import re

from tests.conformance.outcomes import Result

_WITHOUT_THE_FLAG = "asserts that DDP without find_unused_parameters raises"
_USED_MAP = "asserts `reducer._get_local_used_map()`, and DDP's errors without find_unused_parameters"

ASSERTED_OF_DDP = {
    "test_ddp_multiple_nested_unused_params_error": _WITHOUT_THE_FLAG,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _WITHOUT_THE_FLAG,
    "test_ddp_unused_params_rebuild_buckets_exception": _WITHOUT_THE_FLAG,
    "test_invalid_static_graph": "asserts the message of DDP's static_graph",
    "test_ddp_profiling_autograd_profiler": "counts the profiler's events of DDP's own AllReduces",
    "test_ddp_profiling_torch_profiler": "counts the profiler's events of DDP's own AllReduces",
    "test_ddp_broadcast_buffers_deprecation_warning": "counts the warnings of DDP's own deprecation",
    "test_ddp_control_flow_same_across_ranks": _USED_MAP,
    "test_ddp_control_flow_different_across_ranks": _USED_MAP,
    "test_ddp_native_mixed_precision_ignored_params": (
        "asserts `_mp_param` and `_fp_param`, which DDP's private mixed precision puts on parameters"
    ),
    "test_ddp_sync_module_states": (
        "replaces the wrapped module, for a private function that reads `broadcast_bucket_size` of DDP"
    ),
    "test_ddp_device_mesh_initialization": (
        "asserts that `process_group` and `device_mesh` exclude each other, which are one option of compile()"
    ),
    "test_get_data_parallel_params": "calls a private method of DDP's class",
}
"""Body -> what it asserts of DDP itself."""

INTERNAL = frozenset({"reducer", "logger", "broadcast_bucket_size", "bucket_bytes_cap_list"})
"""Attributes of DDP without an underscore that are its own business."""


def reason(name: str, ddp: Result, ours: Result) -> str:
    """Returns why a body does not apply to embrace_fx, or "" if it applies."""
    if ddp.verdict in ("fails", "hangs"):
        return f"DDP itself does not pass it on CPUs: {ddp.line}"
    if ddp.verdict == "skipped":
        return f"torch skips it: {ddp.line}"
    if name in ASSERTED_OF_DDP:
        return ASSERTED_OF_DDP[name]
    missing = re.search(r"object has no attribute '(\w+)'", ours.line)
    if ours.verdict == "fails" and missing and (missing[1].startswith("_") or missing[1] in INTERNAL):
        return f"reads or calls DDP's internal `{missing[1]}`"
    return ""
