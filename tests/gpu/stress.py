"""A stress of memory across streams: many launches, everything dropped as soon as it may be, memory used again at once.

Run as a program, with and without torch's caching allocator: `python -m tests.gpu.stress`. Raises where a value was
overwritten while somebody was still to read it.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from tests.support.launches import ID, NAMES, OF_FORWARD, ORDER

WINDOWS, CYCLES = 150, 200_000


def main() -> None:
    if wrong := overwritten(WINDOWS):
        raise SystemExit(f"{wrong} values were overwritten on the way")


def overwritten(windows: int) -> int:
    """Launches collectives in `windows` windows. Returns how many values were overwritten before they arrived."""
    device, draw = torch.device("cuda", torch.cuda.current_device()), random.Random(0)
    launcher = Launcher(ORDER, OF_FORWARD, StreamQueue(Recorder(), Streams(device)), Communicator(None))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for window in range(windows):
        tickets = [submit(launcher, name, window, draw, device) for name in draw.sample(NAMES, len(NAMES))]
        for number, ticket in draw.sample(tickets, len(tickets) - 1):  # one ticket is never awaited
            wrong += (ticket.wait() != 2 * number).sum()
            litter(draw, device)
        del tickets, ticket
        launcher.open_window()
    launcher.close()
    return int(wrong)


def submit(launcher: Launcher, name: str, window: int, draw: random.Random, device: torch.device) -> tuple[int, Ticket]:
    number = window * len(NAMES) + NAMES.index(name)
    sent = torch.full((draw.randrange(1, 1 << 16),), number, device=device)

    def launch(sent: Tensor = sent) -> InFlight:
        torch.cuda._sleep(draw.randrange(CYCLES))  # stands for the time of a transfer
        received = torch.empty_like(sent)
        torch.add(sent, sent, out=received)
        return InFlight(received, None, reads=(sent,))

    ticket = launcher.submit(ID[name], launch, 0)
    del sent, launch
    litter(draw, device)
    return number, ticket


def litter(draw: random.Random, device: torch.device) -> None:
    """Allocates memory of the sizes in use, and overwrites it."""
    for _ in range(3):
        torch.full((draw.randrange(1, 1 << 16),), -1, device=device)


if __name__ == "__main__":
    main()
