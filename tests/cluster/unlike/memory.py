"""A cluster whose jobs may use no more memory than they ask for: control groups (cgroups) of version 1 limit them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok, start, within
from tmux import Terminal
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Shape

SITE = "partitions: {cpu: {nodes: 1, node: {cpus: 4, mem: 4G}}}\n"
SETTINGS = {"TaskPlugin": "task/cgroup"}
GROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n"
MOUNT = Path("/sys/fs/cgroup/memory")
HUNGRY = """\
import pathlib, time
held = bytearray(b"1") * (360 << 20)
pathlib.Path("held").touch()
while not pathlib.Path("more").exists():
    time.sleep(0.1)
held += bytearray(b"1") * (200 << 20)
"""
"""Of 400 MiB it uses 360, and, once a file ``more`` is there, too much."""


@pytest.fixture
def cluster(workdir: Path) -> Iterator[None]:
    """Mounts are its own where this runs (tools/elsewhere); in a cgroup namespace the machine's show other paths."""
    if not MOUNT.is_dir():
        pytest.skip("this machine has no memory controller of cgroups, version 1")
    subprocess.run(["mount", "-t", "tmpfs", "hpcjobs-cgroups", str(MOUNT.parent)], check=True)
    MOUNT.mkdir()
    subprocess.run(["mount", "-t", "cgroup", "-o", "memory", "memory", str(MOUNT)], check=True)
    site = workdir / "site_configs" / "ours.yaml"
    site.parent.mkdir()
    site.write_text(SITE)
    shape = Shape(like=str(site), settings=SETTINGS, files={"cgroup.conf": GROUPS})
    try:
        sandboxes.up(shape)
        yield
    finally:
        sandboxes.down()


def test_memory_close_to_the_limit_is_an_alarm_and_its_excess_the_cause(
    cluster: None, workdir: Path, tmp_path: Path
) -> None:
    (workdir / "hungry.py").write_text(HUNGRY)
    arguments = ("--site", "ours", "--mem", "400M", "--time", "10m", "--name", "hungry", "--monitor")
    ok("submit", *arguments, sys.executable, "hungry.py")
    eventually((workdir / "held").exists, what="a program that uses 360 MiB")
    watcher = start("monitor", "hungry")
    assert watcher.stdout is not None
    alarm = next(line for line in watcher.stdout if line.startswith("alarm: "))
    assert re.fullmatch(r"alarm: ours01: memory 3\d\d(\.\d)?M of 400M\n", alarm)
    for verb in ("show", "why"):
        assert re.search(r"ours01: memory 3\d\d\.\dM of 400M", ok(verb, "hungry").out)
    terminal = Terminal(tmp_path, 160, 50)
    try:
        terminal.start(sys.executable, "-m", "hpcjobs", "top", "--site", "ours")
        terminal.await_text("ours01: memory 3", "of 400M")
        terminal.press("q")
        terminal.await_exit()
    finally:
        terminal.end()
    (workdir / "more").touch()
    watcher.communicate(timeout=120)
    eventually(lambda: within("wait", "hungry").code != 0)
    cause = ok("why", "hungry", "--json").json
    assert cause["cause"] == "out-of-memory", cause
