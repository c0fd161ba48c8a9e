"""Data sheets of accelerators: memory, speed, and the links to other devices, to the host and to drives.

Used for predictions without a measurement, such as plans for clusters that are not available. Rates are those of the
data sheets, in float32, times `ATTAINED`.

Sources, the vendors' data sheets:
    V100 SXM2 (NVIDIA Tesla V100, 2017)     900 GB/s, 15.7 TFLOP/s, NVLink 150 GB/s each way
    RTX 2080 (Turing whitepaper, 2018)      448 GB/s, 10.1 TFLOP/s, PCIe 3.0 x16
    RTX 3090 (GA102 whitepaper, 2020)       936 GB/s, 35.6 TFLOP/s, PCIe 4.0 x16
    A100 SXM4 40 GB (A100 whitepaper, 2020) 1,555 GB/s, 19.5 TFLOP/s, NVLink 300 GB/s each way
    H100 SXM5 (H100 whitepaper, 2022)       3,352 GB/s, 66.9 TFLOP/s, NVLink 450 GB/s each way
    H200 SXM (H200 data sheet, 2023)        4,800 GB/s, 66.9 TFLOP/s, NVLink 450 GB/s each way
    PM9A3 U.2 (as announced, Samsung, 2020) read 6.5 GB/s, 900,000 a second at random; written 3.5 GB/s, 200,000
    core    a core of a server's CPU: 10 GB/s and 20 GFLOP/s, the order of what the probe measures
"""

from __future__ import annotations

from dataclasses import dataclass

from embrace_fx.cost.links import CORE, Cluster, Compute, Handling, Link
from embrace_fx.cost.storage import StorageTier

ATTAINED = 0.7
"""Fraction of a data sheet's rate that good streaming kernels and large matrix products reach."""
LAUNCH_MS = 0.005
"""Time from one kernel's end to the next one's start if the host enqueues them one by one."""
KERNELS_OF_ROUND = 10
"""Number of kernels that prepare and receive one round of an exchange."""
FIRST_BYTE_MS = 1e-4
"""Memory latency of a core for a row that is not in a cache, for a typical server."""
BYTES_OF_UNIT = 128
"""Bytes moved to sort one index: eight passes of a radix sort over an int64 index and its position."""


@dataclass(frozen=True)
class Device:
    """The data sheet of an accelerator.

    Attributes:
        name: the product's name, such as "H100".
        memory_bytes_per_ms: bandwidth of its memory.
        flops_per_ms: float32 floating-point operations per ms, in matrix products.
        memory_bytes: the size of its memory.
        inside: link to another device of the same machine.
        to_host: link to the machine's host memory.
    """

    name: str
    memory_bytes_per_ms: float
    flops_per_ms: float
    memory_bytes: int
    inside: Link
    to_host: Link

    @property
    def compute(self) -> Compute:
        """The speed at which the device computes a model's forward and backward."""
        return Compute(ATTAINED * self.flops_per_ms, ATTAINED * self.memory_bytes_per_ms, LAUNCH_MS)

    @property
    def handling(self) -> Handling:
        """The speed at which the device gathers, sums and writes gradients."""
        passed = ATTAINED * self.memory_bytes_per_ms
        return Handling(passed, passed, float("inf"), BYTES_OF_UNIT / passed, KERNELS_OF_ROUND * LAUNCH_MS)

    def storage(self, host_bytes: float, cores: int = 8) -> tuple[StorageTier, ...]:
        """Returns the storage tiers for rows of tables larger than the device's memory: host memory, and then the
        machine's drive.

        The host gathers rows into pinned memory while the device copies previous rows. The slower of both determines
        the rate.

        Args:
            host_bytes: bytes of host memory available for this device's rows.
            cores: how many host cores gather the rows.
        """
        byte_ms = max(1 / self.to_host.bandwidth_bytes_per_ms, 2 / (cores * CORE.moved_bytes_per_ms))
        return (StorageTier("host memory", FIRST_BYTE_MS / cores, FIRST_BYTE_MS / cores, byte_ms, host_bytes), NVME)

    def cluster(
        self, bandwidth_bytes_per_ms: float, latency_ms: float = 0.01, *, devices_per_machine: int = 1
    ) -> Cluster:
        """Returns a cluster of machines with these devices.

        Args:
            bandwidth_bytes_per_ms: the bandwidth from one machine to the others.
            latency_ms: latency of a message between machines.
            devices_per_machine: consecutive ranks that share a machine and its link to the others.
        """
        return Cluster(
            bandwidth_bytes_per_ms,
            latency_ms,
            ranks_per_machine=devices_per_machine,
            inside=self.inside if devices_per_machine > 1 else None,
            handling=self.handling,
            compute=self.compute,
        )


_GIB = 2**30
_PCIE_3, _PCIE_4, _PCIE_5 = Link(12.5e6, 0.01), Link(25e6, 0.01), Link(50e6, 0.01)
"""PCIe links of sixteen lanes, without packet headers."""

NVME = StorageTier("NVMe drive", 1e3 / 900e3, 1e3 / 200e3, 1 / 3.5e6)
"""A PM9A3 with a full queue of reads and writes."""

DEVICES = {
    device.name: device
    for device in (
        Device("V100", 900e6, 15.7e9, 16 * _GIB, Link(150e6, 0.01), _PCIE_3),
        Device("RTX 2080", 448e6, 10.1e9, 8 * _GIB, _PCIE_3, _PCIE_3),
        Device("RTX 3090", 936e6, 35.6e9, 24 * _GIB, _PCIE_4, _PCIE_4),
        Device("A100", 1555e6, 19.5e9, 40 * _GIB, Link(300e6, 0.01), _PCIE_4),
        Device("H100", 3352e6, 66.9e9, 80 * _GIB, Link(450e6, 0.01), _PCIE_5),
        Device("H200", 4800e6, 66.9e9, 141 * _GIB, Link(450e6, 0.01), _PCIE_5),
    )
}
"""Name -> device."""

__all__ = ["ATTAINED", "CORE", "DEVICES", "NVME", "Device"]
