"""Devices by their data sheets: what a plan for a cluster of them predicts, in proportion."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.cost.devices import DEVICES
from embrace_fx.cost.links import Cluster, Handling


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
