"""Reads how many bytes this process has sent over TCP, from the kernel's counters for each connection.

An interface's counter would include other programs' traffic.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

_BYTES_SENT_OFFSET = 200
"""Offset of `tcpi_bytes_sent` in `struct tcp_info` (linux/tcp.h, since Linux 4.19); `tcpi_bytes_retrans` follows it."""


def sent_by_connection() -> dict[int, int] | None:
    """Returns the payload bytes that each open TCP connection of this process has sent, by the socket's inode number.
    Returns None if the system does not count them, because it is older than Linux 4.19.
    """
    sent = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is already closed
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                        count = _sent_bytes(connection)
                        if count is None:
                            return None
                        sent[status.st_ino] = count
    return sent


def _sent_bytes(connection: socket.socket) -> int | None:
    """Returns the payload bytes that a TCP connection has sent, or None if the system does not count them."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _BYTES_SENT_OFFSET + 16:
        return None
    sent, sent_again = struct.unpack_from("QQ", info, _BYTES_SENT_OFFSET)
    return int(sent - sent_again)
