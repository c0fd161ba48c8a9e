"""What one run leaves to the next: links that are checked before they are believed, and files that are safe to lose."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from embrace_fx.cost.links import Cluster, Collective, launch_ms
from embrace_fx.runtime.probe import probe as measuring
from embrace_fx.runtime.probe.disk_cache import VARIABLE, cache_folder, read_cached, write_cached
from embrace_fx.runtime.probe.links import measure_links
from embrace_fx.runtime.ranks.communicator import Communicator
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_what_is_kept_is_found_again_under_its_key_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    links = Cluster(1234.5, 0.25)
    assert read_cached(Cluster, "a") is None

    opened = len([*Path("/proc/self/fd").iterdir()])
    write_cached(links, "a")
    assert len([*Path("/proc/self/fd").iterdir()]) == opened

    assert read_cached(Cluster, "a") == links
    assert read_cached(Cluster, "b") is None
    (file,) = (tmp_path / "new").iterdir()
    for content in ("", "{", "[]", '{"what": "Cluster", "value": {"bandwidth_bytes_per_ms": "x"}}', "\udcff"):
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
        assert read_cached(Cluster, "a") is None, content
    monkeypatch.setenv(VARIABLE, str(file / "folder"))  # which cannot be created
    write_cached(links, "a")
    assert read_cached(Cluster, "a") is None


def test_other_versions_and_an_empty_variable_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    write_cached(Cluster(), "a")
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "99.0")
        assert read_cached(Cluster, "a") is None
    monkeypatch.setenv(VARIABLE, "")
    assert cache_folder() is None
    assert read_cached(Cluster, "a") is None


def _links_thrice(rank: int, world_size: int, folder: str) -> tuple[list[int], bool]:
    """Returns how often links had been probed after each of three runs. The third run is on another network."""
    probed: list[int] = []
    real = Cluster(1e5, 0.1)

    def probe(*_: object) -> Cluster:
        probed.append(1)
        return real

    communicator, times, alike = Communicator(dist.group.WORLD), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, folder)
        patch.setattr(measuring, "probe_cluster", probe)
        patch.setattr(measuring, "is_loopback", lambda *_: False)  # otherwise, the usual links of one host
        for holds in (True, True, False):  # the first run has no cached result
            patch.setattr(measuring, "links_still_hold", lambda *_, holds=holds: holds)
            measuring._PROBED.clear()  # as in a new process
            alike.append(measure_links(communicator, 2**30, CPU) == real)
            times.append(len(probed))
        measuring._PROBED.clear()
    communicator.close()
    return times, all(alike)


def test_a_second_run_probes_nothing_unless_the_network_has_changed(tmp_path: Path) -> None:
    for times, alike in run_ranks(2, _links_thrice, str(tmp_path)):
        assert times == [1, 1, 2]
        assert alike
    assert len(list(tmp_path.iterdir())) == 1


def _links_within_a_host(rank: int, world_size: int, folder: str) -> None:
    communicator = Communicator(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, folder)
        patch.setattr(measuring, "probe_cluster", lambda *_: pytest.fail("probes links within a host"))
        patch.setattr(measuring, "LOOPBACK_ALIKE", math.inf)  # on a busy machine, every exchange may be slow
        measuring._PROBED.clear()
        found = measure_links(communicator, 2**30, CPU)
        measuring._PROBED.clear()
    communicator.close()
    assert found == measuring.loopback(world_size)


def test_ranks_of_one_host_have_its_usual_links(tmp_path: Path) -> None:
    run_ranks(2, _links_within_a_host, str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("factors", "usual"),
    [((1.0,), True), ((40.0, 40.0, 2.0), True), ((4.0,), False), ((100.0,), False), ((0.1,), True)],
    ids=["quiet", "busy", "a network", "a slow network", "faster"],
)
@pytest.mark.parametrize("own_bytes", [measuring.FIRST_BYTES, measuring.MOST_BYTES])
def test_links_are_those_of_a_host_if_one_exchange_is_as_fast(
    monkeypatch: pytest.MonkeyPatch, factors: tuple[float, ...], usual: bool, own_bytes: int
) -> None:
    """The AllReduces of the other size are as fast as on a quiet host."""
    links, sizes, left = measuring.loopback(2), [0], [0.0]

    def launch(_: object, collective: Collective, size: int, __: object) -> Callable[[], None]:
        sizes.append(size)
        # The first exchange, which connects the ranks, takes normal time.
        left[:] = [1.0, *factors] if size == own_bytes else [1.0]
        return lambda: None

    def mean_ms(*_: object) -> float:
        return (left.pop(0) if len(left) > 1 else left[0]) * launch_ms(links, "all_reduce", sizes[-1], 2)

    monkeypatch.setattr(measuring, "make_launch", launch)
    monkeypatch.setattr(measuring, "mean_ms", mean_ms)
    communicator = cast(Communicator, SimpleNamespace(world_size=2, reduce_scalar=lambda found, _: found))
    assert measuring.is_loopback(communicator, links) is usual


@pytest.mark.parametrize(
    ("times", "on_one_host", "holds"),
    [
        *(((2.0, 1.0), False, True), ((1 / 2.0, 1.1), False, True), ((1.0, 1 / 1.1), False, True)),
        *(((1.0, 1.4), False, False), ((1.0, 1 / 1.4), False, False), ((4.0, 1.0), False, False)),
        *(((4.0, 4.0), True, True), ((1.0, 20.0), True, False), ((20.0, 1.0), True, False)),
        *(((1 / 2.0, 1 / 1.4), True, True), ((1.0, 1 / 3.5), True, False), ((1 / 4.0, 1.0), True, False)),
    ],
)
def test_links_hold_where_a_large_exchange_takes_about_as_long(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], on_one_host: bool, holds: bool
) -> None:
    """`times` are the factors of the time of a small exchange and of a large one."""
    links, ranks = Cluster(1e4, 0.1), 4
    sizes: list[int] = []

    def launch(_: object, collective: Collective, own_bytes: int, __: object) -> Callable[[], None]:
        sizes.append(own_bytes)
        return lambda: None

    def median_ms(*_: object) -> float:
        return times[sizes[-1] != measuring.FIRST_BYTES] * launch_ms(links, "all_reduce", sizes[-1], ranks)

    monkeypatch.setattr(measuring, "make_launch", launch)
    monkeypatch.setattr(measuring, "mean_ms", lambda *_: 0.0)
    monkeypatch.setattr(measuring, "median_ms", median_ms)

    communicator = cast(Communicator, SimpleNamespace(world_size=ranks))
    assert measuring.links_still_hold(communicator, links, on_one_host=on_one_host) is holds


def test_slow_links_are_checked_by_fewer_bytes() -> None:
    quick, slow = (measuring.bytes_for_rate(Cluster(rate, 0.01), 4) for rate in (1e6, 1e3))
    assert quick == measuring.MOST_BYTES
    assert slow < quick / 10
    assert launch_ms(Cluster(1e3, 0.01), "all_reduce", slow, 4) >= measuring.LONG_MS
