"""The screen of `hpcjobs top`, driven by textual's pilot."""

from __future__ import annotations

from typing import cast

from textual.pilot import Pilot

from hpcjobs.top.screen import TopScreen


async def wait_until_drawn(pilot: Pilot[Exception]) -> None:
    """Return once nothing is asked or read, and the screen shows it."""
    app = cast(TopScreen, pilot.app)
    await pilot.pause()
    while app.updates.busy:
        await pilot.pause(0.01)
    await pilot.pause()
