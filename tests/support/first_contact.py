"""Programs that a test runs as a user would, to see what they say by themselves."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

TRAIN = """
import logging, sys, time
import torch
import torch.distributed as dist
import embrace_fx
{set_up}

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4000, 8)
        self.top = torch.nn.Linear(8, 1)

    def forward(self, ids):
        {slow}
        return self.top(self.table(ids)).square().mean()

if "RANK" in __import__("os").environ:
    dist.init_process_group("gloo")
model = Slow()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model = embrace_fx.compile(model, optimizer=optimizer, cluster=embrace_fx.Cluster(1e3, 0.1))
for _ in range(2):
    model(torch.arange(6)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Two steps of a small model; `slow` runs while its forward is traced, `set_up` before everything."""


def program(set_up: str = "", slow: str = "pass") -> list[str]:
    return [sys.executable, "-c", TRAIN.format(set_up=set_up, slow=slow)]


def on_terminal(command: list[str], timeout_s: float) -> tuple[int, list[tuple[float, str]]]:
    """Runs a command whose stderr is a pseudo-terminal.

    Returns: its exit status, and what it wrote with the seconds at which it was read.
    """
    return _watched(command, timeout_s, *pty.openpty())


def through_a_pipe(command: list[str], timeout_s: float) -> tuple[int, list[tuple[float, str]]]:
    """The same where stderr is no terminal."""
    return _watched(command, timeout_s, *os.pipe())


def _watched(command: list[str], timeout_s: float, ours: int, theirs: int) -> tuple[int, list[tuple[float, str]]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    written, deadline_s = [], time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline_s:
            try:
                text = os.read(ours, 65536)
            except OSError:  # the terminal's other side is closed
                break
            if not text:
                break
            written.append((time.monotonic(), text.decode(errors="replace")))
        return process.wait(max(0.0, deadline_s - time.monotonic())), written
    finally:
        process.kill()
        process.wait()
        os.close(ours)
