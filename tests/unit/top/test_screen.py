"""The screen itself, driven by textual's pilot: what is shown, and what each key does."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import cast

import pytest
from hostile_text import EVIL, OBEYED
from snapshots import NOW, make_node, make_progress, make_snapshot, make_task
from textual.pilot import Pilot

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.scheduler.base import State
from hpcjobs.top import screen as drawing
from hpcjobs.top.look import Looker
from hpcjobs.top.rows import JobRow, Snapshot
from hpcjobs.top.screen import JobTable, TopScreen


class ScriptedLooker:
    """Gives the snapshots it was made with, the last one for ever."""

    def __init__(self, *snapshots: Snapshot | HpcJobsError | Exception) -> None:
        self.answers, self.looks = list(snapshots), 0

    def look(self, *, unfolded: Collection[str] = ()) -> Snapshot:
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reread(self, snapshot: Snapshot, *, unfolded: Collection[str] = ()) -> Snapshot:
        return snapshot


class NotedActions:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def read_log(self, row: JobRow) -> list[str]:
        self.calls.append(("log", row.job))
        return [f"line {number}" for number in range(100)]

    def explain(self, row: JobRow) -> list[str]:
        self.calls.append(("why", row.job))
        return ["cause: [bold] is no markup"]

    def cancel(self, row: JobRow) -> str:
        self.calls.append(("cancel", row.job))
        return f"cancelled {row.job}"

    def shell(self, row: JobRow) -> Sequence[str]:
        raise RequestError(f"no shell for {row.job}")


def text_of(app: TopScreen) -> str:
    """The screen as text: what tmux or a reader sees."""
    return "\n".join("".join(part.text for part in line).rstrip() for line in app.screen._compositor.render_strips())


def rows_of(app: TopScreen) -> Sequence[JobRow]:
    return app.query_one(JobTable).jobs


async def until(pilot: Pilot[Exception], holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await pilot.pause(0.01)
    raise AssertionError(f"it has not come to pass; the screen:\n{text_of(cast(TopScreen, pilot.app))}")


def drive(
    steps: Callable[[Pilot[Exception], TopScreen, NotedActions], Awaitable[None]],
    *snapshots: Snapshot | HpcJobsError | Exception,
    size: tuple[int, int] = (80, 24),
) -> TopScreen:
    """Run ``steps`` against a screen that begins with `make_snapshot` and then sees ``snapshots``."""
    actions = NotedActions()
    looker = cast(Looker, ScriptedLooker(*(snapshots or (make_snapshot(),))))
    app = TopScreen(looker, make_snapshot(), actions, clock=lambda: NOW)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: "Logs" in text_of(app))  # the keys are drawn last
            await steps(pilot, app, actions)

    asyncio.run(run())
    return app


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (40, 12)])
def test_every_size_shows_the_jobs_their_states_and_the_keys(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        parts = ("42", "RUNNING", "1✗ 1R 97P 1✓", "q Quit" if size[0] > 60 else "Logs")
        await until(pilot, lambda: all(part in text_of(app) for part in parts))
        assert max(map(len, text_of(app).splitlines())) <= size[0]

    drive(steps, size=size)


def test_the_arrow_keys_choose_the_job_that_is_described() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        assert "44  array on tu-hpc  1 RUNNING, 97 PENDING" in text_of(app)
        await pilot.press("down", "down")
        await until(pilot, lambda: "step 250 of 1000" in text_of(app))
        assert "n2          GPU ██████░░  71%" in text_of(app)

    drive(steps, size=(100, 30))


def test_enter_unfolds_an_array_and_folds_it_again() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        assert "44_1" not in text_of(app)
        await pilot.press("enter")
        await until(pilot, lambda: "  44_1" in text_of(app))
        await pilot.press("down", "enter")
        await until(pilot, lambda: "44_1" not in text_of(app))

    drive(steps)


def test_a_filter_is_typed_and_escape_drops_it() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("slash", *"wide", "enter")
        await until(pilot, lambda: [row.job for row in rows_of(app)] == ["45"])
        assert "filter: wide" in text_of(app)
        await pilot.press("escape")
        await until(pilot, lambda: len(rows_of(app)) == 6)

    drive(steps)


def test_the_cursor_stays_on_its_job_when_the_order_changes() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("down", "down")
        assert app.chosen is not None
        assert app.chosen.job == "42"
        await pilot.press("o")
        await until(pilot, lambda: "by newest" in text_of(app))
        assert rows_of(app)[0].job == "46"
        assert app.chosen.job == "42"

    drive(steps)


def test_cancel_asks_and_only_yes_cancels() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("c")
        await until(pilot, lambda: "Cancel 98 tasks of 44 (array)?" in text_of(app))
        await pilot.press("n")
        await pilot.press("down", "c", "y")
        await until(pilot, lambda: "cancelled 43" in text_of(app))
        assert actions.calls == [("cancel", "43")]
        await pilot.press(*["down"] * 5, "c")
        await until(pilot, lambda: "job 41 has ended" in text_of(app))
        assert len(actions.calls) == 1

    drive(steps)


def test_logs_and_why_are_shown_as_they_are_and_escape_leaves_them() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("l")
        await until(pilot, lambda: "line 99" in text_of(app))
        await pilot.press("escape", "w")
        await until(pilot, lambda: "cause: [bold] is no markup" in text_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: "JOB" in text_of(app))
        assert [call for call, _ in groupby(actions.calls)] == [("log", "44"), ("why", "44")]  # a log is read again

    drive(steps)


def test_nothing_on_the_screen_commands_the_terminal_whoever_wrote_it() -> None:
    forged = f"{EVIL}\nhpcjobs: done"
    task = make_task("47", State.PENDING, forged, reason=forged, node_list=forged, alarms=(forged,),
                     progress=make_progress(5), nodes=(make_node(forged),))  # fmt: skip
    task = task._replace(group=task.group._replace(name=forged, site=forged))
    hostile = make_snapshot()._replace(tasks=(task,), errors=(forged,))

    class HostileActions(NotedActions):
        def read_log(self, row: JobRow) -> list[str]:
            return [EVIL, "\x1b[31mred\x1b[0m \x1b]8;;http://evil\x1b\\link", "end of the log"]

        def explain(self, row: JobRow) -> list[str]:
            return [EVIL, "end of why"]

        def shell(self, row: JobRow) -> Sequence[str]:
            raise RequestError(forged)

    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        app.actions = HostileActions()
        await pilot.press("r")
        await until(pilot, lambda: "47" in text_of(app))
        shown = {"r": "x?]52;c", "s": "x?]52;c", "l": "end of the log", "escape w": "end of why", "escape c": "y: yes"}
        for keys, text in shown.items():
            await pilot.press(*keys.split())
            await until(pilot, lambda: text in text_of(app))  # noqa: B023 # within this turn
            assert OBEYED.findall(text_of(app).replace("\n", "")) == [], (keys, text_of(app))
            assert "\nhpcjobs: done" not in text_of(app)
        await pilot.press("n")

    drive(steps, hostile, size=(160, 40))


def test_what_a_key_cannot_do_is_said() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("s")
        await until(pilot, lambda: "no shell for 44" in text_of(app))

    drive(steps)


def test_a_scheduler_that_does_not_answer_leaves_the_jobs_on_the_screen() -> None:
    down = HpcJobsError("no answer from Slurm", hint="is the controller up?")

    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("r")
        await until(pilot, lambda: "no answer from Slurm" in text_of(app))
        assert len(rows_of(app)) == 6

    drive(steps, down)


def test_an_unforeseen_error_ends_the_screen_and_is_handed_on() -> None:
    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("r")
        await until(pilot, lambda: app.return_value is not None)

    assert isinstance(drive(steps, ZeroDivisionError("why?")).return_value, ZeroDivisionError)


def test_the_scheduler_is_asked_more_rarely_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "ASK_S", 0.01)
    monkeypatch.setattr(drawing, "ASK_RARELY_S", 0.02)
    changed = make_snapshot()._replace(tasks=(make_task("99", State.RUNNING, "new"),))
    periods: list[float] = []

    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        looker = cast(ScriptedLooker, app.updates.looker)
        await until(pilot, lambda: periods.append(app.updates.every_s) or looker.looks > 4)  # type: ignore[func-returns-value]
        assert 0.02 in periods
        looker.answers = [changed]
        await until(pilot, lambda: [row.job for row in rows_of(app)] == ["99"])

    drive(steps)


def test_the_picture_of_the_documentation_is_the_screen_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """GOLDEN=write draws it anew."""
    picture = Path(__file__).parents[3] / "docs" / "images" / "top.svg"
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    drawn: list[str] = []

    async def steps(pilot: Pilot[Exception], app: TopScreen, actions: NotedActions) -> None:
        await pilot.press("down", "down")
        await until(pilot, lambda: "step 250 of 1000" in text_of(app))
        drawn.append(app.export_screenshot(title="hpcjobs top"))

    drive(steps, size=(110, 18))
    monkeypatch.undo()
    time.tzset()
    if os.environ.get("GOLDEN") == "write":
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(drawn[0], encoding="utf-8")

    def texts(svg: str) -> list[str]:
        return re.findall(r">([^<>\n]+)</text>", svg)

    assert texts(drawn[0]) == texts(picture.read_text(encoding="utf-8"))
    assert any("train-lm" in text for text in texts(drawn[0]))
