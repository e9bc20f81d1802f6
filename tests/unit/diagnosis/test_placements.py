"""Which sites ``hpcjobs where`` looks at."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok


def test_where_lists_my_sites_and_this_machine_but_no_examples(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", str(here / "no-sandbox"))
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text("partitions: {cpu: {nodes: 4, node: {cpus: 4, mem: 8G}}}\n")
    assert {row["site"] for row in ok("where", "--json", "true").json} == {"local", "mine"}
    assert {row["site"] for row in ok("where", "--site", "a10g-box", "--json", "true").json} == {"a10g-box"}
