"""What a machine without Slurm cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcjobs.errors import RequestError
from hpcjobs.scheduler.base import JobQueue, Scheduler, connect
from hpcjobs.scheduler.local.client import LocalScheduler

REFUSED: dict[str, Callable[[Scheduler], object]] = {
    "hold": lambda local: local.hold(["L1"]),
    "release": lambda local: local.release(["L1"]),
    "requeue": lambda local: local.requeue(["L1"]),
    "update": lambda local: local.update("L1", ["TimeLimit=5"]),
    "signal": lambda local: local.signal(["L1"], "USR1", batch_script=False),
    "scontrol": lambda local: local.query(["scontrol", "show", "config"]),
    "squeue": lambda local: local.follow(["squeue"], print),
}


@pytest.mark.parametrize("verb", REFUSED)
def test_a_verb_that_needs_slurm_is_refused_by_its_name(verb: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"^{verb}\b.*this machine's own queue"):
        REFUSED[verb](LocalScheduler(tmp_path))


def test_every_scheduler_has_every_verb_of_the_interface() -> None:
    verbs = {name for part in (JobQueue, Scheduler) for name in vars(part) if not name.startswith("_")}
    assert {"submit", "queue", "account", "cancel", "signal", "hold", "requeue", "query", "step", "estimate"} <= verbs
    for kind in ("slurm", "local"):
        assert not {verb for verb in verbs if not callable(getattr(connect(kind), verb, None))}
