"""What the lab measures: systems on models, over numbers of ranks and rates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.device.profile import profile_of
from benchmarks.lab.cell import Cell
from benchmarks.lab.floors import FLOOR_BATCHES, floor
from benchmarks.models import MODELS as WORKLOADS
from benchmarks.network import Links
from benchmarks.peers import SYSTEMS

INSIDE = 10.0
"""How many times as fast as to other hosts ranks send to those of their own."""


class Block(NamedTuple):
    """The measurements that are made together, in turns, over one network.

    Attributes:
        rate_mbit: the rate at which a rank can send; in slow motion, the perceived rate.
        slow: the factor by which device and links are slower than they are said to be; 0 if ranks compute on the cores.
        per_host: the number of ranks that share a host. The host's link carries `rate_mbit` for each of them, and the
            link inside the host `INSIDE` times as much.
    """

    model: str
    ranks: int
    rate_mbit: float
    group: str
    slow: float = 0.0
    per_host: int = 1

    @property
    def title(self) -> str:
        where = f"{self.model}, {self.ranks} ranks" + (f", {self.per_host} per host" if self.per_host > 1 else "")
        if not self.slow:
            return f"{where}, {self.rate_mbit:g} Mb/s, {self.group}"
        return f"{where}, emulated device, k = {self.slow:g}, perceived rate {self.rate_mbit:g} Mb/s, {self.group}"

    @property
    def stem(self) -> str:
        stem = f"{self.model}-{self.ranks}-{self.rate_mbit:g}-{self.group.replace(' ', '-')}"
        stem += f"-x{self.per_host}" if self.per_host > 1 else ""
        return f"{stem}-k{self.slow:g}" if self.slow else stem

    @property
    def stretched(self) -> float:
        """Returns the factor by which everything takes longer than it is said to take."""
        return self.slow or 1.0

    @property
    def links(self) -> Links:
        inside_mbit = INSIDE * self.rate_mbit if self.per_host > 1 else 0.0
        return Links(self.ranks, self.rate_mbit * self.per_host, self.stretched, self.per_host, inside_mbit)


class Extra(NamedTuple):
    """Groups of systems that are measured only on one model, for one number of ranks and one rate; see `Setting`.

    Attributes:
        slow: the slowdown of these groups, or 0 for that of the setting. More ranks on the same processors need a
            larger one.
    """

    model: str
    ranks: int
    ratio: float
    groups: tuple[str, ...]
    per_host: int = 1
    slow: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Describes what is measured.

    Attributes:
        name: the name of the result files.
        models: names of models in `MODELS`.
        groups: name -> its systems, in the order of their turns: as many as the machine's memory holds at once.
        rounds: the number of rounds. Results that are quoted need at least 5 if ranks share cores; emulated devices
            vary by about 1 %.
        rounds_besides: the number of rounds of all groups except `MAIN`, or 0 for the same number.
        ranks, rates_mbit: the numbers of ranks and the rates, in the order of measurement. A rate limits what a rank
            sends, and what it receives.
        elsewhere: groups that are measured over fewer ranks and other rates too. At `ranks[0]`, the first rate and the
            first `slow` all groups are, but those of `extra` and `not_first`.
        scaling: those that are measured over other ranks and at another `slow`; empty: those of `elsewhere`.
        not_first: groups that are not measured there, because they are part of another one.
        one_by_one: elsewhere, only one of ranks, rate and `slow` is another one.
        extra: what is measured besides.
        slow: of an emulated device: one block for each; empty: ranks compute on the cores that they share.
        slower: models that are measured at twice as large k, for at these ones steps do not agree.
        ratios: of an emulated device, after `rates_mbit`: rates at which what `RATED_RANKS` ranks must send takes
            so many times as long as what they compute.
        together: of fewer than `MOST_RANKS`, the systems of all groups but `CHOSEN` are one block, for the memory
            holds them.
        turn_ms: a system's turn has as many steps as this is long, at least `fewest_steps` and at most `most_steps`.
            One alone would not show what a step that hides its communication behind the next one costs.
    """

    name: str
    models: tuple[str, ...]
    groups: dict[str, tuple[str, ...]]
    rounds: int
    ranks: tuple[int, ...]
    rates_mbit: tuple[float, ...]
    elsewhere: tuple[str, ...] = ()
    scaling: tuple[str, ...] = ()
    not_first: tuple[str, ...] = ()
    one_by_one: bool = False
    extra: tuple[Extra, ...] = ()
    slow: tuple[float, ...] = ()
    slower: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    together: bool = False
    turn_ms: float = 1_000.0
    fewest_steps: int = 2
    most_steps: int = 4
    size: str = "lab"
    optimizer: str = "adagrad"
    learning_rate: float = 0.001
    seed: int = 0
    timeout_s: float = 300.0
    rounds_besides: int = 0

    def blocks(self) -> Iterator[Block]:
        motions, rates = self.slow or (0.0,), range(len(self.rates_mbit) + len(self.ratios))
        not_first = {*self.not_first, *(group for extra in self.extra for group in extra.groups)}
        for slow, rate, ranks in itertools.product(motions, rates, self.ranks):
            others = (slow != motions[0]) + (rate > 0) + (ranks != self.ranks[0])
            if self.one_by_one and others > 1:
                continue
            elsewhere = self.elsewhere if rate > 0 else self.scaling or self.elsewhere
            groups = [group for group in self.groups if (group in elsewhere if others else group not in not_first)]
            if self.together and ranks < MOST_RANKS:
                groups = list(dict.fromkeys(CHOSEN if group == CHOSEN else TOGETHER for group in groups))
            for group, model in itertools.product(groups, self.models):
                yield Block(model, ranks, self.rate_mbit(model, rate), group, self._slow(model, slow))
        for extra in self.extra:
            for group in [group for group in extra.groups if group in self.groups and extra.model in self.models]:
                rate_mbit = perceived_rate_mbit(extra.model, self.size, extra.ratio, self.seed)
                slow = extra.slow or self._slow(extra.model, motions[0])
                yield Block(extra.model, extra.ranks, rate_mbit, group, slow, extra.per_host)

    def _slow(self, model: str, slow: float) -> float:
        return 2 * slow if model in self.slower else slow

    def rate_mbit(self, model: str, number: int) -> float:
        """Returns the rate with this index for a model: first the given rates, then those that follow from `ratios`."""
        if number < len(self.rates_mbit):
            return self.rates_mbit[number]
        return perceived_rate_mbit(model, self.size, self.ratios[number - len(self.rates_mbit)], self.seed)

    def rounds_of(self, block: Block) -> int:
        return self.rounds if block.group in (MAIN, CHOSEN) else self.rounds_besides or self.rounds

    def systems(self, block: Block) -> tuple[str, ...]:
        if block.group != TOGETHER:
            return self.groups[block.group]
        merged = [group for group in self.groups if group in self.elsewhere and group != CHOSEN]
        return tuple(dict.fromkeys(system for group in merged for system in self.groups[group]))

    def cell(self, block: Block, system: str, port: int) -> Cell:
        warm_up_steps = SYSTEMS[system].slow_warm_up_steps if block.slow else SYSTEMS[system].warm_up_steps
        return Cell(
            block.model,
            self.size,
            system,
            self.optimizer,
            self.learning_rate,
            self.seed,
            block.rate_mbit / block.stretched,
            warm_up_steps,
            port,
            self.timeout_s,
            block.slow,
        )


RATED_RANKS = 8
"""A rate is set for these, and the same for more and for fewer: only the number of ranks differs."""


@functools.cache
def perceived_rate_mbit(model: str, size: str, ratio: float, seed: int) -> float:
    """Returns the rate, to three digits, at which the cheapest exchange takes `ratio` times the profile's compute."""
    cheapest = floor(WORKLOADS[model][size], RATED_RANKS, range(FLOOR_BATCHES), seed)
    rate = cheapest.bytes_per_rank * 8 / 1e3 / (ratio * profile_of(model, size).compute_ms)
    return float(f"{rate:.3g}")


TOGETHER, MOST_RANKS = "together", 8
CHOSEN = "chosen"
"""The group of systems that a user names."""
MODELS = ("lm", "transformer", "bert", "gnmt", "recommender")
LARGER = "embrace_2d_rows10"
REPLICAS = ("ddp", "ddp_sparse", "horovod", "horovod_sparse")
SHARDED = ("torchrec_column", "torchrec_row", "torchrec_planner", "ours_parameter_server", "ours_parallax")
ABLATION = ("embrace_none", "embrace_vertical", "embrace_horizontal", "embrace_2d")
AUTO = "embrace_auto"
"""Decides one of these schedules by the cost model."""
MAIN = "main"
"""The group of which there are most rounds."""
DEVICE_STRATEGIES = ("allgather", "alltoall", "zen")
"""Forced on emulated devices. Parameter servers are among "peers", OmniReduce was never the fastest where all were
measured, and the bytes of an AllReduce of whole tables alone take longer than a step of `embrace_2d`."""
FORCED = "forced"
"""The group of `embrace_2d`, whose planner chooses, beside each strategy forced on all tables."""
GROUPS = {
    "replicas": (
        "alone_dense",
        "alone_sparse",
        "embrace_alone",
        "ddp",
        "ddp_sparse",
        "ddp_compiled",
        "horovod",
        "horovod_sparse",
        "embrace_2d",
    ),
    "shards": (
        "alone_sparse",
        "embrace_alone",
        "torchrec_column",
        "torchrec_row",
        "torchrec_planner",
        "ours_parameter_server",
        "ours_parallax",
        "embrace_2d",
    ),
    "ablation": (
        "embrace_alone",
        *ABLATION,
        AUTO,
        "embrace_2d_rows10",
    ),
}
"""All of them have `embrace_2d`, which the others of the group are compared with."""

DEVICE_GROUPS = {
    MAIN: ("alone_sparse", "ddp_sparse", "torchrec_column", "embrace_none", "embrace_2d"),
    "peers": (
        "alone_dense",
        "ddp",
        "ddp_compiled",
        "horovod",
        "horovod_sparse",
        "torchrec_row",
        "torchrec_planner",
        "ours_parameter_server",
        "ours_parallax",
        "embrace_2d",
    ),
    "ours": (
        "embrace_alone",
        "embrace_horizontal",
        "embrace_vertical",
        "embrace_2d",
        LARGER,
        *(f"forced_{strategy}" for strategy in DEVICE_STRATEGIES),
    ),
    "schedules": (*ABLATION, AUTO),
    "few": ("ddp_sparse", "torchrec_column", "embrace_none", "embrace_2d"),
    "scaling": ("ddp_sparse", "embrace_none", "embrace_2d"),
    "replicas": ("ddp_sparse", "horovod_sparse", "embrace_2d"),
    "sharded": ("torchrec_column", "torchrec_row", "ours_parallax", "embrace_2d"),
    "two levels": ("ddp_sparse", "embrace_2d", "forced_alltoall", "forced_zen"),
}
"""On emulated devices; `embrace_2d` is what `strategy="auto"` chooses. "few" are measured at other rates, "scaling" at
another k and over other ranks; "replicas" and "sharded" are as many as the memory holds 16 ranks of; of "two levels",
Zen's doubling begins inside of hosts."""

SETTINGS = {
    "quick": Setting(
        "quick",
        ("lm", "transformer"),
        {"quick": ("alone_sparse", "embrace_alone", "ddp", "ddp_sparse", "embrace_none", "embrace_2d")},
        rounds=5,
        ranks=(4,),
        rates_mbit=(200.0,),
    ),
    "full": Setting(
        "full",
        MODELS,
        GROUPS,
        rounds=5,
        ranks=(8, 4, 2),
        rates_mbit=(200.0, 2_000.0),
        elsewhere=("replicas", "shards"),
        together=True,
    ),
    "strategies": Setting(
        "strategies",
        MODELS,
        {FORCED: ("embrace_alone", "embrace_2d", *(s for s in SYSTEMS if s.startswith("forced_")))},
        rounds=5,
        ranks=(8, 4, 2),
        rates_mbit=(200.0, 2_000.0),
        elsewhere=(FORCED,),
    ),
    "device": Setting(
        "device",
        ("lm", "recommender", "transformer", "bert", "gnmt"),
        DEVICE_GROUPS,
        rounds=3,
        rounds_besides=2,
        ranks=(8, 16, 4, 2),
        rates_mbit=(),
        elsewhere=("few",),
        scaling=("scaling",),
        not_first=("few", "scaling"),
        one_by_one=True,
        extra=(
            Extra("lm", 16, 2.0, ("replicas", "sharded")),
            Extra("lm", 16, 1.0, ("scaling",), slow=32.0),
            Extra("lm", 16, 1.0, ("scaling",), slow=64.0),
            Extra("recommender", 16, 1.0, ("scaling",), slow=64.0),
            Extra("lm", 8, 1.0, ("two levels",)),
            Extra("lm", 8, 1.0, ("two levels",), per_host=2),
        ),
        slow=(16.0, 32.0),
        slower=("recommender", "bert", "gnmt"),
        ratios=(1.0, 2.0, 0.5),
        turn_ms=1.0,
        timeout_s=900.0,
    ),
    "device-cuda": Setting(
        "device-cuda",
        ("lm", "recommender", "transformer", "bert", "gnmt"),
        {MAIN: ("ddp", "ddp_sparse", "embrace_none", "embrace_2d")},
        rounds=3,
        ranks=(2,),
        rates_mbit=(100_000.0,),
        slow=(1.0, 4.0, 8.0, 16.0, 32.0, 64.0),
        size="paper",
        timeout_s=900.0,
    ),
    "device-quick": Setting(
        "device-quick",
        ("lm",),
        {"quick": ("alone_sparse", "embrace_alone", "ddp_sparse", "embrace_none", "embrace_2d")},
        rounds=3,
        ranks=(4,),
        rates_mbit=(),
        slow=(8.0,),
        ratios=(1.0,),
        turn_ms=1.0,
    ),
}
