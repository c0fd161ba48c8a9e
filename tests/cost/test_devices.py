"""Devices by their data sheets: what a plan for a cluster of them predicts, in proportion."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.cost.devices import ATTAINED, DEVICES, Device
from embrace_fx.cost.links import CORE, Cluster, Compute, Handling, Link


def test_compute_takes_the_time_of_its_products_and_of_its_bytes() -> None:
    assert Compute(1e6, 1e3, 0.5).time_ms(2e6, 4e3) == pytest.approx(0.5 + 2.0 + 4.0)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_a_device_passes_over_its_own_memory_at_what_is_attained_of_its_rate(device: Device) -> None:
    handling, compute = device.handling, device.compute
    assert handling.pass_bytes_per_ms == compute.moved_bytes_per_ms == ATTAINED * device.memory_bytes_per_ms
    assert compute.flops_per_ms == ATTAINED * device.flops_per_ms
    assert handling.pass_bytes_per_ms > Handling().pass_bytes_per_ms
    assert compute.flops_per_ms > CORE.flops_per_ms
    assert device.memory_bytes % 2**30 == 0


def test_a_cluster_of_machines_with_several_devices_knows_the_link_inside() -> None:
    device = DEVICES["RTX 3090"]
    alone, four = (device.cluster(12.5e6, 0.01, devices_per_machine=k) for k in (1, 4))
    assert alone.inside is None
    assert four.inside == device.inside
    assert four.flattened(4).link("all_reduce") == Link(device.inside.bandwidth_bytes_per_ms, device.inside.latency_ms)
    assert four.flattened(16).compute == four.flattened(4).compute == device.compute
    assert four.flattened(16).handling == four.flattened(4).handling == device.handling


class Words(nn.Module):
    """A table of 1 GB, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500_000, 512)
        self.mix = nn.LSTM(512, 512, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.table(ids))[0].square().mean()


def planned(cluster: Cluster, world_size: int) -> embrace_fx.Plan:
    with torch.device("meta"):
        model = Words()
    ids = torch.randint(500_000, (32, 20), generator=torch.Generator().manual_seed(0))
    return embrace_fx.plan(model, ids, world_size=world_size, cluster=cluster, optimizer=SGD(model.parameters(), 0.1))


def test_a_model_on_the_meta_device_is_planned_for_many_devices() -> None:
    cluster = DEVICES["RTX 3090"].cluster(12.5e6, devices_per_machine=4)
    plan = planned(cluster, 1024)
    assert plan["table.weight"].strategy == "alltoall"
    assert plan.world_size == 1024


def test_on_a_device_links_are_what_an_allreduce_of_a_table_waits_for() -> None:
    """A core takes seconds to update a gigabyte; a device, the time of its memory."""
    links = Cluster(12.5e6, 0.01)
    device = DEVICES["A100"].cluster(12.5e6, 0.01)
    of_core, of_device = (
        next(c for c in planned(each, 4)["table.weight"].candidates if c.strategy == "allreduce").predicted_ms
        for each in (links, device)
    )
    transfer_ms = links.transfer_ms(2 * 3 / 4 * 500_000 * 512 * 4, 6)
    assert transfer_ms < of_device < 1.2 * transfer_ms
    assert of_core > 5 * of_device
    assert planned(replace(device, handling=Handling()), 4)["table.weight"].predicted_ms > 0
