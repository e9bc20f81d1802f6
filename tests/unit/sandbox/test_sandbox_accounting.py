"""Who may submit to a sandbox."""

from __future__ import annotations

import pwd
from types import SimpleNamespace

import pytest

from hpcjobs.sandbox.services import users_of_the_machine


def test_all_people_of_the_machine_may_submit_and_no_user_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says that the sandbox is for every user of the machine."""
    users = {"root": 0, "daemon": 1, "anna": 1000, "ben.b": 1001, "nobody": 65534, "DOM\\\\carl": 1002}
    entries = [SimpleNamespace(pw_name=name, pw_uid=uid) for name, uid in users.items()]
    monkeypatch.setattr(pwd, "getpwall", lambda: entries)
    monkeypatch.setenv("SUDO_USER", "anna")
    assert users_of_the_machine() == ["root", "anna", "ben.b"]
