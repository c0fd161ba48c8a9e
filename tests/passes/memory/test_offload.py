"""Values that are offloaded: the same bits, no more held than allowed, and nothing reads what has gone."""

from __future__ import annotations

import functools
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import embrace_fx
import embrace_fx.passes.memory.budget as budget_pass
from embrace_fx.cost.links import CORE
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.copy_placement import CopyRate, PlacedCopy, place_copies
from embrace_fx.passes.memory.offload import InsertCopies, offloadable_values
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import build_single_process
from embrace_fx.passes.step_memory import Storage, step_memory
from embrace_fx.runtime.memory import copies
from embrace_fx.runtime.memory.copies import FileCopies, PinnedCopies
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.session import offloading
from embrace_fx.vocabulary.copy_ops import OFFLOAD, offload_id, reload_id
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import op_name
from tests.support.budgets import IDS, make
from tests.support.checkpointed import Block, Recurrent
from tests.support.graphs import analysed
from tests.support.inside import pipeline_of
from tests.support.ranks import run_ranks
from tests.support.streams.noted_streams import NotedStreams

FAST = CopyRate(1e9)
"""So fast that offloading is always the better choice."""


@functools.cache
def offloaded() -> TrainingGraph:
    """The joint graph of a step that offloads."""
    return run_passes(analysed(make(Block), IDS), (EagerDropout(), Memory(0.6, CORE, FAST))).graph


def names_of(graph: TrainingGraph, op: str) -> list[str]:
    return [node.name for node in graph.graph.nodes if op_name(node) == op]


def test_copies_are_lanes_of_schedule_and_timeline() -> None:
    graph = run_passes(offloaded(), (Partition(),)).graph
    shown = schedule(build_single_process(graph, CORE), "2d")

    values = [name.removesuffix("_offload") for name in names_of(graph, OFFLOAD)]
    assert values
    assert {str(o.id) for o in shown.steps.copies} == {str(i(v)) for v in values for i in (offload_id, reload_id)}
    ends = {(s.window, s.operation.name): s.end_ms for s in shown.predicted.spans}
    starts = {(s.window, s.operation.name): s.start_ms for s in shown.predicted.spans}
    for value in values:  # values offloaded in one window are reloaded in the next
        assert ends[0, str(offload_id(value))] <= starts[1, str(reload_id(value))]
    reads = {d.before: d.after for d in shown.steps.dependences if d.before.startswith("reload")}
    for reload, reader in reads.items():
        assert ends[1, reload] <= starts[1, reader] + 1e-9
    assert {"offload", "reload"} <= {s.operation.lane for s in shown.predicted.spans}


def fails(rank: int, world_size: int, how: str, directory: str) -> tuple[bool, list[str]]:
    """Runs a step that one rank cannot complete. Returns whether parameters have changed, and the errors."""
    own = f"{directory}/{rank}"
    if how != "directory missing" or rank == 0:
        os.mkdir(own)
    told = []
    compiled = embrace_fx.compile(
        make(Recurrent), strategy={"table.weight": "alltoall"}, memory_budget=0.4, spill_to=own
    )
    before = {name: p.detach().clone() for name, p in compiled.named_parameters()}
    ids = IDS[rank::world_size]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if how == "disk full" and rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (34 * 2**20, limits[1]))
        # Forbid recomputation, because with a slow disk the pass would recompute everything and offload nothing.
        with mock.patch.object(budget_pass, "can_recompute", return_value=False):
            loss = compiled(ids if how != "disk full" else ids.repeat(1, 200))
        if how == "cut off" and rank == 1:
            copies: Any = pipeline_of(compiled)._copies
            os.ftruncate(copies._file.descriptor, 0)
        loss.backward()
    except (RuntimeError, ValueError, PeerFailure) as error:
        told.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    same = all(torch.equal(p, before[name]) for name, p in compiled.named_parameters() if p.shape == before[name].shape)
    return same and all(p.grad is None for p in compiled.parameters()), told


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("directory missing", "spill_to: no file can be created in"),
        ("cut off", "cannot be read back"),
        ("disk full", "bytes had been reserved"),
    ],
)
def test_what_one_rank_cannot_copy_is_an_error_on_every_rank(how: str, expected: str, tmp_path: Path) -> None:
    for same, told in run_ranks(2, fails, how, str(tmp_path)):
        assert same
        assert len(told) == 1
        assert expected in told[0]


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="Pass table_memory or memory_budget"):
        embrace_fx.compile(make(Block), spill_to="/tmp")


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(SIZES, st.floats(0.5, 50.0), st.integers(1, 150), st.lists(st.floats(0.1, 3.0), min_size=12, max_size=12))
def test_copies_are_placed_within_the_limit_or_as_near_as_can_be(
    sizes: list[int], rate: float, limit: int, durations: list[float]
) -> None:
    """A chain: value k is made at node k, read at k + 1, and again in the mirror image of the forward."""
    count = 2 * len(sizes)
    starts = [0.0]
    for k in range(count):
        starts.append(starts[-1] + durations[k])
    storages = [
        Storage(k, fx.Graph().placeholder("x"), size, k, count - 1 - k, min(k + 1, len(sizes) - 1), count - 1 - k)
        for k, size in enumerate(sizes)
    ]
    by_time = [sum(s.nbytes for s in storages if s.born <= k <= s.dies) for k in range(count)]

    found = place_copies(storages, by_time, starts, len(sizes), limit, CopyRate(rate))

    held_then = list(by_time)
    for copy in found.copies:
        s = copy.storage
        assert s.last_forward < copy.left <= len(sizes) <= copy.comes <= copy.reload_awaited_at == s.first_backward
        for k in range(copy.left, copy.comes):
            held_then[k] -= s.nbytes
    assert max(held_then) == found.peak_bytes
    nearest = [
        sum(s.nbytes for s in storages if s.born <= k <= s.last_forward or (s.first_backward or 0) <= k <= s.dies)
        for k in range(count)
    ]
    assert found.peak_bytes <= limit or found.peak_bytes == max(nearest)
    assert found.added_ms >= 0.0


def test_an_offload_that_takes_all_of_the_forward_is_awaited_at_its_end() -> None:
    graph = analysed(make(Block), IDS).edit()
    found = step_memory(graph)
    storage, value = next(iter(offloadable_values(found).items()))
    last, first = found.nodes[found.backward - 1], found.nodes[found.backward]
    InsertCopies(graph, found, FAST)([PlacedCopy(storage, found.backward, found.backward)])
    order = [node.name for node in graph.graph.nodes]
    places = [order.index(name) for name in (last.name, f"{value.name}_await_offload", first.name)]
    assert places == sorted(places)


@pytest.mark.parametrize("kind", ["file", "pinned"])
def test_what_comes_back_is_what_left(kind: str, tmp_path: Path) -> None:
    streams = NotedStreams()
    copies = FileCopies(tmp_path) if kind == "file" else PinnedCopies(streams)
    values = [torch.randn(7, 5).t(), torch.arange(3), torch.randn(4, 4)[:, 1:3], torch.tensor(True), torch.empty(0)]
    for _ in range(2):
        out = [copies.offload(value, offload_id(f"v{k}"), None) for k, value in enumerate(values)]
        stored = [copies.await_offload(each) for each in out]
        coming = [copies.reload(each, reload_id(f"v{k}"), None) for k, each in enumerate(stored)]
        for value, each in zip(values, coming, strict=True):
            back = copies.await_reload(each)
            assert torch.equal(back, value)
            assert back.stride() == value.stride()
            assert back.dtype == value.dtype


def test_room_in_the_file_is_used_again(tmp_path: Path) -> None:
    copies = FileCopies(tmp_path)
    for _ in range(3):
        stored = copies.await_offload(copies.offload(torch.randn(5000), offload_id("v"), None))
        copies.await_reload(copies.reload(stored, reload_id("v"), None))
        del stored
    assert copies._room <= 2 * 20480
    assert not list(tmp_path.iterdir())


def test_the_rate_of_copies_is_in_milliseconds_of_the_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that computes in 1 ms what counts as 4 ms, each ms of a copy counts as 4 ms, too."""
    monkeypatch.setattr(offloading, "measure_pace", lambda *_: 4.0)
    # The last of three rounds counts, in the slower direction, as do the bytes beyond the first.
    early = (0.0, 9.0, 9.0, 0.0, 7.0, 7.0, 0.0)
    now, steps_ms = [0.0], iter([*early, 2.0, 3.0, *early, 1003.0, 1.0])
    monkeypatch.setattr(copies, "PROBED_BYTES", 8000)
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(FileCopies, "synchronize", lambda _: now.append(now.pop() + next(steps_ms) / 1e3))
    ranks = SimpleNamespace(check_none_failed=lambda _: None, gather=lambda own, _: [own])
    options = SimpleNamespace(spill_to=tmp_path)
    context: Any = SimpleNamespace(options=options, model=torch.nn.Linear(1, 1), communicator=ranks)
    _, rate = offloading.set_up_offloading(context, CORE)
    assert (rate.bytes_per_ms, rate.start_ms) == pytest.approx((2.0, 12.0))
    assert next(steps_ms, None) is None
