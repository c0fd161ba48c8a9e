"""Bytes on the wire, as the system counts them."""

from __future__ import annotations

import os
from pathlib import Path

INTERFACES = Path("/proc/net/dev")


def sent_bytes() -> int | None:
    """Bytes that the ranks of this machine have sent to each other so far, packet headers included.

    Read from the transmit counter of the loopback interface, which carries what processes of one machine send to each
    other, whatever address they use, and counts each byte once for all ranks together. Other programs' loopback
    traffic counts too. None without torchrun, where the ranks are on several machines, and where the system is not
    Linux.
    """
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None or world_size != os.environ.get("LOCAL_WORLD_SIZE") or not INTERFACES.exists():
        return None
    counters = dict(line.split(":") for line in INTERFACES.read_text(encoding="ascii").splitlines() if ":" in line)
    loopback = next(values for name, values in counters.items() if name.strip() == "lo")
    return int(loopback.split()[8])  # eight columns for receiving come first
