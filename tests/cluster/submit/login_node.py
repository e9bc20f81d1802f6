"""What a user has on the login node of the sandbox, shaped like tu-hpc, four hosts."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commandline import Answer, hpcjobs
from waiting import eventually

from hpcjobs.site.machine import Rehearsal

SITE = "tu-hpc"


@dataclass(frozen=True)
class Cluster:
    """A login node: hpcjobs, Slurm's own commands, and a folder that every host sees."""

    folder: Path
    record: Rehearsal
    submitted: list[str] = field(default_factory=list)
    """Ids of the jobs that must not outlive the test."""

    def hpcjobs(self, *arguments: str, cwd: Path | None = None, timeout_s: float = 500) -> Answer:
        return hpcjobs(*arguments, cwd=cwd or self.folder, timeout_s=timeout_s)

    def submit(self, *arguments: str, cwd: Path | None = None) -> Submitted:
        answer = self.hpcjobs("submit", "--site", SITE, "--json", *arguments, cwd=cwd)
        assert answer.code == 0, answer
        return self.took(answer.out)

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """What ``hpcjobs ps`` tells of this test's own jobs."""
        answer = self.hpcjobs("ps", "--json", *arguments)
        assert answer.code == 0, answer
        return [row for row in answer.json if row["run_dir"] is not None]

    def took(self, output: str) -> Submitted:
        """The job that ``hpcjobs submit --json`` tells of, perhaps below other lines of a log."""
        answer, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
        self.submitted.append(answer["job_id"])
        return Submitted(self, answer["job_id"], Path(answer["run_dir"]))

    def slurm(self, *argv: str, env: dict[str, str] | None = None) -> str:
        """What one of Slurm's own commands prints."""
        environment = {**os.environ, "SLURM_CONF": self.record.slurm_conf, **(env or {})}
        done = subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (argv, done.stdout, done.stderr)
        return done.stdout

    def program(self, name: str, text: str) -> str:
        """A program in the folder; its name."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return name if name.endswith(".py") else f"./{name}"


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm took."""

    cluster: Cluster
    id: str
    run_dir: Path

    def wait(self, *, timeout_s: float = 500) -> Answer:
        return self.cluster.hpcjobs("wait", self.id, timeout_s=timeout_s)

    def done(self) -> Submitted:
        """The job, which must succeed, once it has ended."""
        answer = self.wait()
        assert answer.code == 0, (answer, self.log)
        return self

    @property
    def log(self) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in sorted((self.run_dir / "logs").iterdir()))

    @property
    def state(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.run_dir / "state.json").read_text(encoding="utf-8"))
        return document

    def sacct(self) -> dict[str, str]:
        """Job id or task id -> state, as Slurm's accounting has it."""
        out = self.cluster.slurm("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", self.id)
        return dict(line.split("|") for line in out.splitlines())

    def becomes(self, state: str) -> None:
        """Return once the queue shows ``state``."""
        eventually(lambda: self.cluster.slurm("squeue", "-h", "-o", "%T", "-j", self.id).split()[:1] == [state])
