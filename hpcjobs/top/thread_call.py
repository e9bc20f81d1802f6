"""Hands calls of a thread to the screen."""

from __future__ import annotations

from collections.abc import Callable

from textual.message import Message


class ThreadCall(Message):
    """A call that a thread hands to the screen, without waiting for it: the screen may be about to end."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
