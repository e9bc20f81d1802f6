"""Decides when the screen asks the scheduler and reads files again. One thread at a time does either."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from textual.app import App
from textual.timer import Timer

from hpcjobs.errors import HpcJobsError
from hpcjobs.top.look import Looker
from hpcjobs.top.snapshot import Snapshot
from hpcjobs.top.thread_call import ThreadCall

ASK_S, ASK_RARELY_S = 5.0, 60.0
"""Between two questions to the scheduler: at first and after a change, and at most while nothing changes."""
_SLOWER = 1.5
READ_S = 2.0
"""Between two looks at the files of running jobs."""


class Refresh:
    """Keeps ``snapshot`` up to date, and calls ``show`` after each look; ``busy`` while a thread asks or reads.

    ``unfolded`` gives the keys of the groups whose tasks are all shown.
    """

    def __init__(
        self,
        app: App[Exception],
        looker: Looker,
        first: Snapshot,
        *,
        unfolded: Callable[[], Collection[str]],
        show: Callable[[], None],
    ) -> None:
        self.looker, self.snapshot, self.every_s = looker, first, ASK_S
        self._app, self._unfolded, self._show = app, unfolded, show
        self._asking: Timer | None = None
        self.busy = self._ask_next = False

    def start(self) -> None:
        """Begin to ask and to read from time to time."""
        self._asking = self._app.set_timer(self.every_s, self._ask)
        self._app.set_interval(READ_S, self._read_if_visible)

    def ask_soon(self) -> None:
        """Ask the scheduler now, and often again."""
        self._stop_timer()
        self.every_s = ASK_S
        self._ask()

    def read(self) -> None:
        """Read the files of running jobs now, unless something is asked or read just then."""
        if not self.busy:
            self.busy = True
            self._in_thread(partial(self.looker.reread, self.snapshot), self._take)

    def _read_if_visible(self) -> None:
        if self._app.screen is self._app.screen_stack[0]:
            self.read()

    def _ask(self) -> None:
        if self.busy:
            self._ask_next = True
            return
        self.busy, self._ask_next = True, False
        self._in_thread(self.looker.look, self._take_answer)

    def _in_thread(self, look: Callable[..., Snapshot], then: Callable[[Snapshot], None]) -> None:
        self._app.run_worker(partial(self._look, look, then), thread=True)

    def _look(self, look: Callable[..., Snapshot], then: Callable[[Snapshot], None]) -> None:
        try:
            snapshot = look(unfolded=self._unfolded())
        except HpcJobsError as error:
            snapshot = self.snapshot._replace(errors=(str(error),))
        except Exception as error:  # the command line explains it
            self._app.post_message(ThreadCall(partial(self._app.exit, error)))
            return
        self._app.post_message(ThreadCall(partial(then, snapshot)))

    def _take_answer(self, snapshot: Snapshot) -> None:
        changed = snapshot.changes_from(self.snapshot)
        self.every_s = ASK_S if changed else min(ASK_RARELY_S, self.every_s * _SLOWER)
        self._stop_timer()
        self._asking = self._app.set_timer(self.every_s, self._ask)
        self._take(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        self.busy, self.snapshot = False, snapshot
        self._show()
        if self._ask_next:
            self._ask()

    def _stop_timer(self) -> None:
        if self._asking is not None:
            self._asking.stop()
