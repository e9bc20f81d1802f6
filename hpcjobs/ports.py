"""Ports of this machine."""

from __future__ import annotations

import socket


def find_free_port() -> int:
    """A port that no program of this machine listens at, for a program on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Whether a program could listen at ``port``; connections that ended lately do not count. ``""``: any address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
