"""A Slurm whose commands answer from tables of text, and the tables that hpcjobs prints, as rows."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpcjobs.site import machine
from hpcjobs.site.machine import cluster_name

SITE = """
description: two racks
cluster: mine
defaults: {account: lab, partition: gpu}
partitions:
  gpu: {nodes: 8, max_time: 2-00:00:00, node: {cpus: 64, mem: 512G, gpus: 4}}
prices: {cpu_hour: 0.02, gpu_hour: 1.5, node_hour: 0.25, currency: EUR}
watts: {cpu: 4, gpu: 300, node_idle: 120}
"""
_SACCT = """
import json, re, sys
options = {word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:]}
rows = json.load(open(FOLDER + "/sacct.json"))
if "--helpformat" in options:
    print(" ".join(dict.fromkeys(name for row in rows for name in row)))
    sys.exit()
ids = {re.split("[_.+]", each)[0] for each in options.get("--jobs", "").split(",")} - {""}
for row in rows:
    if not ids or re.split("[_.+]", row["JobID"])[0] in ids:
        print(options["--delimiter"].join(row.get(name, "") for name in options["--format"].split(",")))
"""
_SQUEUE = """
import json, re, sys
(form,) = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("--format=")]
for row in json.load(open(FOLDER + "/squeue.json")):
    print(re.sub("%([A-Za-z])", lambda letter: row.get(letter[1], ""), form))
"""
_SBATCH = """
import sys
if "--test-only" in sys.argv:
    print(open(FOLDER + "/test-only").read(), file=sys.stderr)
else:
    number = int(open(FOLDER + "/next").read())
    open(FOLDER + "/next", "w").write(str(number + 1))
    print(number)
"""
_SCONTROL = """
import sys
if "config" in sys.argv:
    print("ClusterName = mine")
"""


class ScriptedCluster:
    """Commands of Slurm in a folder of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        silent = dict.fromkeys(("scancel", "sinfo", "srun", "sacctmgr", "sstat"), "")
        scripts = {"sacct": _SACCT, "squeue": _SQUEUE, "sbatch": _SBATCH, "scontrol": _SCONTROL, **silent}
        for name, script in scripts.items():
            path = folder / name
            path.write_text(f"#!{sys.executable} -SE\nFOLDER = {str(folder)!r}\n{script}", encoding="utf-8")
            path.chmod(0o755)
        (folder / "next").write_text("100", encoding="utf-8")
        self.account([])
        self.queue([])

    def account(self, rows: Sequence[Mapping[str, str]]) -> None:
        """From now on sacct has these rows: jobs, each before its steps."""
        (self.folder / "sacct.json").write_text(json.dumps(rows), encoding="utf-8")

    def accounted(self) -> list[dict[str, str]]:
        """The rows that sacct has."""
        rows: list[dict[str, str]] = json.loads((self.folder / "sacct.json").read_text(encoding="utf-8"))
        return rows

    def queue(self, rows: Sequence[Mapping[str, str]]) -> None:
        """From now on squeue has these jobs, by the letters of its ``--format``."""
        (self.folder / "squeue.json").write_text(json.dumps(rows), encoding="utf-8")

    def estimate(self, text: str) -> None:
        """What ``sbatch --test-only`` prints from now on."""
        (self.folder / "test-only").write_text(text, encoding="utf-8")


def read_table(out: str, first: str) -> list[dict[str, str]]:
    """The rows of the printed table whose first header is ``first``: cells by header, empty ones too."""
    lines = out.splitlines()
    (top,) = [n for n, line in enumerate(lines) if re.match(rf"\s*{re.escape(first)}(  |$)", line)]
    columns = [(match.start(), match[0]) for match in re.finditer(r"\S+(?: \S+)*", lines[top])]
    rows = []
    for line in lines[top + 2 :]:
        if not line.strip() or line.startswith("page "):
            break
        ends = [start for start, _ in columns[1:]] + [len(line)]
        rows.append({name: line[start:end].strip() for (start, name), end in zip(columns, ends, strict=True)})
    return rows


def read_duration(text: str) -> tuple[float, float]:
    """The seconds of ``1h02m``, and how long its smallest unit is: figures are cut off there."""
    seconds = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+)([dhms])", text)
    return sum(int(count) * seconds[unit] for count, unit in parts), seconds[parts[-1][1]]


_FOREIGN = ("HPCJOBS_", "SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "XDG_")


@pytest.fixture(name="cluster", autouse=True)
def scripted_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    """The site ``mine``, whose Slurm is scripted; nothing of the user's own."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(name)
    here, home = tmp_path / "here", tmp_path / "home"
    (here / "site_configs").mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    (here / "site_configs" / "mine.yaml").write_text(SITE, encoding="utf-8")
    commands = ScriptedCluster(tmp_path / "slurm")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", str(tmp_path / "no-sandbox"))
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    monkeypatch.chdir(here)
    cluster_name.cache_clear()  # another test's cluster
    machine._has_configuration.cache_clear()
    return commands
