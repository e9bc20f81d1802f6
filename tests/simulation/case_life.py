"""Lives in which one rare course of events happens for certain: most are defects of the past, by their shortest story.

The seeds of `Life` draw courses from all that may happen, and some of them once in thousands. Here a seed names a case,
its times and its cluster; `checkers` decide as ever.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bodies
from life import Life, Schedule, Submission, plan_for
from slurm import Slurm
from world import Fault

from hpcjobs.processes.start import Result


class CaseLife(Life):
    """One case with its own faults; those of the schedule do not happen."""

    def __init__(self, schedule: Schedule, home: Path) -> None:
        super().__init__(schedule._replace(faults=()), home)
        self.draw = self.world.random
        self._on_command: list[tuple[str, tuple[str, ...], Callable[[list[str]], Result | None]]] = []

    def prepare(self) -> None:
        self.slurm.run = functools.partial(self._run, self.slurm.run)  # type: ignore[method-assign]
        name = CASES[self.schedule.seed % len(CASES)]
        self.world.log(f"case {name}")
        getattr(self, f"_case_{name}")()
        self.world.log(f"{self.settings}")

    # --- what cases are made of

    def set(self, *, nodes: int | None = None, **settings: Any) -> None:
        """Choose what the case needs of the cluster."""
        for name, value in settings.items():
            setattr(self.settings, name, value)
        if nodes is not None:
            self.settings.nodes = nodes
            self.slurm.names[:] = [f"n{number}" for number in range(nodes)]

    def job(self, kind: str = "plain", *, at_s: float = 0.0, array: str | None = None, **work: Any) -> Submission:
        """A job that a user submits."""
        run_dir = self.home / "runs" / f"{kind}-{len(self.submissions)}"
        made = bodies.Work(str(run_dir), retries=kind == "retries", **work)
        self._know(run_dir, made, kind)
        one = Submission(made, plan_for(kind, run_dir, array=array), 3 if array else 0, kind)
        self.submissions.append(one)
        self.user(f"submit {len(self.submissions) - 1}", lambda: self.submit(one), delay_s=at_s)
        return one

    def fault(self, kind: str, at: int, detail: str) -> None:
        self.world.faults[kind, at] = detail

    def on_command(self, process: str, *tokens: str, does: Callable[[list[str]], Result | None]) -> None:
        """Once, as a process of this name gives Slurm a command with these tokens, before Slurm takes it up."""
        self._on_command.append((process, tokens, does))

    def _run(self, run: Callable[..., Result], argv: list[str], env: dict[str, str] | None = None) -> Result:
        current = self.world.current
        for known in self._on_command:
            process, tokens, does = known
            if current is not None and current.name.startswith(process) and set(tokens) <= set(argv):
                self._on_command.remove(known)
                self.world.log(f"case: {' '.join(argv)[:60]}")
                if (answer := does(argv)) is not None:
                    return answer
                break
        return run(argv, env)

    def looks(self, *delays_s: float) -> None:
        for delay_s in delays_s:
            self.user("ps", self.look, delay_s=delay_s)

    # --- cases

    def _case_found_late(self) -> None:
        """The submitter is killed after the answer; the job loses its node, and is found minutes later."""
        self.set(accounting="prompt", keeps_commands=self.draw.random() < 0.3, job_requeue=False, min_job_age_s=10.0)
        self.job(steps=100, step_s=20.0)
        self.fault("sbatch", 0, "kill_after")
        self.world.after(self.draw.uniform(10, 300), self._fail_node)
        self.looks(self.draw.uniform(400, 2000))

    def _fail_node(self, **how: Any) -> None:
        busy = [name for job in self.slurm.jobs.values() if job.attempt is not None for name in job.attempt.nodes]
        if busy:
            self.slurm.fail_node(busy[0], **{"back_after_s": 600.0, **how})

    def _case_lost_records(self) -> None:
        """A program always fails, and no attempt can be recorded."""
        one = self.job("retries", code=1, fails_at=1, fails_always=True, step_s=20.0)
        attempts = f"{one.plan.run_dir}/attempts.jsonl"
        self.world.after(5.0, lambda: os.symlink("gone/attempts.jsonl", attempts))

    def _case_saves_nothing(self) -> None:
        """A program goes on through its signal and its time limit, and saves nothing."""
        self.set(allows_requeue=True, job_requeue=True)
        self.job("retries", steps=100, saves=False)

    def _case_torn_write(self) -> None:
        """A process is killed as it writes a file: the submitter, or node.pyz."""
        self.job("retries", steps=4, step_s=20.0)
        self.fault("write", self.draw.randrange(6, 14), "torn")
        self.looks(self.draw.uniform(100, 500))

    def _case_cancelled_while_it_waits(self) -> None:
        """Without accounting only slurmctld knows of it, for some seconds."""
        self.set(nodes=1, accounting="absent", min_job_age_s=10.0)
        self.job(steps=40, step_s=20.0)
        waiting = self.job(at_s=10.0)
        self.user("cancel", lambda: self.cancel(waiting), delay_s=self.draw.uniform(15, 300))

    def _case_ends_while_slurmctld_is_away(self) -> None:
        """slurmctld comes back after the job's limit, and has TIMEOUT for it."""
        self.set(accounting=self.draw.choice(("prompt", "late")), accounting_lag_s=5.0)
        one = self.job(self.draw.choice(("plain", "retries")), steps=64, step_s=20.0)
        self.world.injected.append(Fault("event", 1270, "restart"))
        self.world.after(1270.0, lambda: self.slurm.restart(away_s=self.draw.uniform(600, 800), keeps_state=True))
        self.user("wait", lambda: self.wait(one), delay_s=self.draw.choice((60.0, 1300.0)))

    def _case_killed_before_its_end_was_written(self) -> None:
        """node.pyz is killed with its node as it writes the state of a completed job, which Slurm then starts again."""
        self.set(nodes=2, accounting=self.draw.choice(("absent", "prompt")), min_job_age_s=10.0)
        self.set(allows_requeue=True, job_requeue=True)
        one = self.job("retries", steps=4, step_s=self.draw.choice((5.0, 20.0)))
        before, work = self.files.before, self.works[one.work.run_dir]

        def kill_once(path: object, *, creates: bool) -> None:
            current = self.world.current
            if current is not None and current.name.startswith("job") and work.completed and "state.json" in str(path):
                self.files.before = before  # type: ignore[method-assign]
                self.world.after(0.0, self._fail_node)
                self.world.kill(current)
            before(path, creates=creates)

        self.files.before = kill_once  # type: ignore[method-assign]

    def _case_ends_before_its_lost_answer_is_missed(self) -> None:
        self.set(accounting=self.draw.choice(("absent", "prompt")), min_job_age_s=300.0)
        self.job(steps=1, step_s=0.5)
        self.fault("sbatch", 0, self.draw.choice(("lost_after", "killed_after")))

    def _case_given_up_node(self) -> None:
        """Slurm gives a node up, and starts the job elsewhere while the first attempt lives on, and ends."""
        self.set(nodes=2, allows_requeue=True, job_requeue=True, requeue_delay_s=self.draw.choice((10.0, 120.0)))
        fails = self.draw.random() < 0.5
        self.job("retries", steps=40, step_s=20.0, code=1, fails_at=35 if fails else None)
        self.world.after(self.draw.uniform(100, 500), lambda: self._fail_node(ghost_s=3000.0))
        self.looks(*(self.draw.uniform(700, 1500) for _ in range(3)))

    def _case_requeued_within_minutes(self) -> None:
        """A job is cancelled, requeued by hand, and ends a second time before five minutes have passed."""
        self.set(requeue_delay_s=self.draw.choice((10.0, 60.0)), allows_requeue=True, job_requeue=True)
        self.set(accounting=self.draw.choice(("prompt", "prompt", "absent")))
        one = self.job(steps=4, step_s=self.draw.choice((5.0, 10.0)), on_term="die", save_s=1.0)
        self.user("cancel", lambda: self.cancel(one), delay_s=self.draw.uniform(6, 15))
        self.looks(self.draw.uniform(20, 40))
        again_s = self.draw.uniform(45, 60)
        self.user("requeue", lambda: self.control("requeue", one), delay_s=again_s)
        self.looks(again_s + self.draw.uniform(1, 20), again_s + 130.0)

    def _case_cancelled_before_its_signal(self) -> None:
        """The time of the signal ahead of the limit comes while the script ends slowly."""
        one = self.job("retries", steps=100, on_term=self.draw.choice(("save", "ignore")), save_s=60.0)
        self.user("cancel", lambda: self.cancel(one), delay_s=self.draw.uniform(1480, 1500))

    def _case_resubmitted(self) -> None:
        """Where requeueing is forbidden a job submits another one, whose id is not answered."""
        self.set(allows_requeue=False)
        self.job("retries", steps=100, step_s=20.0)
        self.fault("resubmit", 0, self.draw.choice(("lost_after", "killed_after", "lost_down", "kill_after")))
        if self.draw.random() < 0.5:
            self.fault("resubmit", 1, "lost_before")

    def _case_array_in_parts(self) -> None:
        """The accounting has one task of an array after the other."""
        self.set(nodes=2, accounting="late", accounting_lag_s=400.0, min_job_age_s=10.0)
        self.job(array="0-2", steps=1, step_s=self.draw.choice((0.5, 20.0)), code=self.draw.choice((0, 3)))
        self.looks(*(self.draw.uniform(10, 800) for _ in range(6)))

    def _case_has_it_done_again(self) -> None:
        """Somebody requeues a job that ended, and looks, waits or tidies up."""
        self.set(allows_requeue=True, job_requeue=True, min_job_age_s=3000.0, accounting="prompt")
        one = self.job(steps=10, step_s=20.0, code=self.draw.choice((0, 3)))
        self.user("story", lambda: self._story(one), delay_s=3.0)

    def _case_requeued_by_its_user_too(self) -> None:
        """Somebody requeues the job just before it does so itself."""
        self.set(allows_requeue=True, job_requeue=True)
        self.job("retries", steps=100, step_s=20.0)

        def requeue(argv: list[str]) -> None:
            Slurm.run(self.slurm, argv)

        self.on_command("job", "scontrol", "requeue", does=requeue)

    def _case_outlived_by_its_sbatch(self) -> None:
        """The submitter is killed while sbatch waits for slurmctld, which takes the job later."""
        one = self.job()

        def outlive(argv: list[str]) -> None:
            assert self.world.current is not None
            self.world.after(late_s, lambda: Slurm.run(self.slurm, argv) and None)
            one.outcome = "killed"
            self.world.kill(self.world.current)

        late_s = self.draw.uniform(30, 400)
        self.on_command("submit", "sbatch", "--parsable", does=outlive)
        self.looks(self.draw.uniform(5, late_s))

    def _case_interrupted_record(self) -> None:
        """Ctrl-C comes while an accepted job is recorded."""
        self.job()
        self.fault("record", self.draw.randrange(6), self.draw.choice(("INT", "TERM", "HUP")))

    def _case_cancelled_as_it_requeues_itself(self) -> None:
        """The cancellation reaches slurmctld before the job's request for a requeue, which is on its way."""
        self.set(allows_requeue=True, job_requeue=True)
        array = self.draw.choice((None, None, "0-2"))
        one = self.job("retries", array=array, steps=100, step_s=20.0)

        def cancel(argv: list[str]) -> None:
            self.user("cancel", lambda: self.cancel(one))
            self.world.sleep(self.draw.uniform(2, 20))

        self.on_command("job", "scontrol", "requeue", does=cancel)


CASES = [name.removeprefix("_case_") for name in vars(CaseLife) if name.startswith("_case_")]
