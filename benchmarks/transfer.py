"""How fast bytes go from one rank to another: the check of a network that has been shaped."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
WARM_UP_S = 0.1
MEASURED_S = 0.25
RECEIVE_BUFFER_BYTES = 64 * 1024
"""Small: on a busy machine the receiver reads late, and what had piled up before the measurement would count in it."""


class Host(Protocol):
    """The interface of a host on which a rank runs."""

    @property
    def address(self) -> str: ...

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function on the host."""
        ...


def transfer_mbit(sender: Host, receiver: Host) -> float:
    """Returns the payload rate of a bare TCP transfer, after a warm-up that empties the token buckets and fills the
    window.
    """
    # A socket stays in the namespace in which it was created, so any thread may use it.
    with receiver.call(socket.create_server, (receiver.address, 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        source = sender.call(socket.create_connection, server.getsockname())
        sink, _ = server.accept()
    enough = threading.Event()
    pump = threading.Thread(target=_send_until, args=(source, enough))
    pump.start()
    with sink:
        _receive_bytes(sink, WARM_UP_S)
        started = time.perf_counter()
        received = _receive_bytes(sink, MEASURED_S)
        elapsed_s = time.perf_counter() - started
        enough.set()
        while sink.recv(RECEIVE_BUFFER_BYTES):
            pass  # drain the link, so that the next measurement does not count these bytes
    pump.join()
    return received * 8 / 1e6 / elapsed_s


def _send_until(source: socket.socket, enough: threading.Event) -> None:
    chunk = bytes(RECEIVE_BUFFER_BYTES)
    with source, contextlib.suppress(ConnectionError):  # ignore that the receiver was interrupted
        while not enough.is_set():
            source.sendall(chunk)


def _receive_bytes(sink: socket.socket, duration_s: float) -> int:
    buffer, received, end = bytearray(RECEIVE_BUFFER_BYTES), 0, time.perf_counter() + duration_s
    while time.perf_counter() < end:
        received += sink.recv_into(buffer)
    return received
