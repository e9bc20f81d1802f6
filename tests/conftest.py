"""Skips are part of the result: each is listed, and one that tests/known_skips.txt does not allow fails the run."""

from __future__ import annotations

import os
import signal
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType

import pytest

HERE = Path(__file__).parent
KNOWN_SKIPS = HERE / "known_skips.txt"
NO_HOROVOD = Path(sys.prefix) / ".no-horovod"
"""Why this environment has no Horovod: written by ``install_horovod.sh --optional``."""
SKIPS = pytest.StashKey[list[tuple[str, str]]]()
UNKNOWN_SKIPS = 8
"""The exit status of a run with a skip that is not on the list, also where tests failed; pytest's own are below 6."""


def _allowed() -> list[str]:
    """The patterns of test ids that may skip here and now."""
    lines = (line.split("#")[0].split() for line in KNOWN_SKIPS.read_text(encoding="utf-8").splitlines())
    holds = {
        "always": True,
        "not-root": os.geteuid() != 0,
        "no-horovod": NO_HOROVOD.exists(),
        "lowest": Path(sys.prefix).name == ".venv-lowest",
    }
    return [arguments[1] for arguments in lines if arguments and holds[arguments[0]]]


class _Notes:
    """Collects skips."""

    def __init__(self, config: pytest.Config) -> None:
        self.skips = config.stash[SKIPS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            self.skips.append((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))


def _outlive(number: int, frame: FrameType | None) -> None:
    """Go on after a signal that whoever started the tests ignores."""


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:  # as by nohup: programs do not inherit a handler
            signal.signal(number, _outlive)
    config.stash[SKIPS] = []
    config.pluginmanager.register(_Notes(config))


def _unknown(config: pytest.Config) -> list[str]:
    allowed = _allowed()
    return [test for test, _ in config.stash[SKIPS] if not any(fnmatchcase(test, pattern) for pattern in allowed)]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and _unknown(session.config):
        session.exitstatus = UNKNOWN_SKIPS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skips = config.stash[SKIPS]
    if not skips:
        return
    unknown = set(_unknown(config))
    terminalreporter.section("skips")
    for test, reason in skips:
        verdict = "NOT ON THE LIST" if test in unknown else "known"
        terminalreporter.line(f"{verdict}: {test}: {reason}")
    if NO_HOROVOD.exists():
        terminalreporter.line(f"no Horovod: {NO_HOROVOD.read_text(encoding='utf-8').strip()}")
    if unknown:
        terminalreporter.line(f"failed: {len(unknown)} skipped, and tests/known_skips.txt does not allow it", red=True)
