"""Waits for jobs while their scheduler does not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpcjobs.errors import SchedulerError

Report = Callable[[str], None]
_T = TypeVar("_T")


def discard(line: str) -> None:
    """Report nothing: the argument of a caller that wants no messages."""


class Outage:
    """Questions to a scheduler over a long time: after its first answer no error of it ends the waiting.

    The first error of an outage is reported, and so is the end of the outage.
    """

    def __init__(self, report: Report = discard) -> None:
        self._report = report
        self._has_answered = self.lasts = False

    def ask(self, question: Callable[[], _T]) -> _T | None:
        """The answer; None during an outage.

        Raises:
            SchedulerError: the scheduler has never answered yet.
        """
        try:
            answer = question()
        except SchedulerError as error:
            if not self._has_answered:
                raise
            if not self.lasts:
                self._report(f"the scheduler does not answer; waiting goes on: {error.message}")
            self.lasts = True
            return None
        if self.lasts:
            self._report("the scheduler answers again")
        self._has_answered, self.lasts = True, False
        return answer
