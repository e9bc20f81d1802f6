"""Causes that the scheduler's state, a signal or an exit code shows by itself."""

from __future__ import annotations

from typing import NamedTuple

from hpcjobs import gpu_errors


class EndCause(NamedTuple):
    """The cause of an end, its words and what to do; both are filled in as those of rules are."""

    cause: str
    text: str
    fix: tuple[str, ...] = ()
    certain: bool = True


STATES: dict[str, EndCause] = {
    "TIMEOUT": EndCause(
        "time-limit",
        "The job reached its time limit{time_limit}",
        ("{again} --time {more_time}", "{again} --retries timeout=3  # where the program saves checkpoints"),
    ),
    "DEADLINE": EndCause("deadline", "The job could not end before its deadline", ("{again} --time SHORTER",)),
    "OUT_OF_MEMORY": EndCause(
        "out-of-memory",
        "The tasks used more memory than the job had{requested_memory}",
        ("{again} --mem {more_memory}",),
    ),
    "NODE_FAIL": EndCause("node-failed", "A node failed{failed_node}", ("{again} --exclude {host}",)),
    "BOOT_FAIL": EndCause("node-failed", "A node did not start{failed_node}", ("{again} --exclude {host}",)),
    "LAUNCH_FAILED": EndCause(
        "node-failed", "Slurm could not start the job on its nodes", ("{again} --exclude {nodes}",)
    ),
    "PREEMPTED": EndCause("preempted", "The job was preempted: another job took its nodes", ("{again} --retries on",)),
    "REVOKED": EndCause("revoked", "The job was revoked: it started on another cluster of the federation"),
    "CANCELLED": EndCause("cancelled", "The job was cancelled{canceller}", ("{again}",)),
}
"""By Slurm's state of the job."""

SIGNALS: dict[int, EndCause] = {
    4: EndCause("illegal-instruction", "Killed by an illegal instruction: the program is built for another CPU",
                ("lscpu  # on the node; build for the oldest CPU of the partition, or use --constraint",)),
    6: EndCause("aborted", "The program aborted itself (SIGABRT)",
                ("hpcjobs logs {job}  # the lines before it say why",)),
    7: EndCause("bus-error", "Killed by a bus error: often a full /dev/shm, or a file that was cut short while in use",
                ("df -h /dev/shm  # on the node",), certain=False),
    8: EndCause("arithmetic-error", "Killed by an arithmetic error in compiled code (SIGFPE)"),
    9: EndCause("killed", "Killed by signal 9 (SIGKILL); nothing records by whom. Often the node was out of memory",
                ("hpcjobs report advise {job}  # its peak memory", "{again} --mem {more_memory}"), certain=False),
    11: EndCause("segmentation-fault", "Killed by a segmentation fault: a memory error in compiled code",
                 ("{again} --env PYTHONFAULTHANDLER=1  # prints where",)),
    15: EndCause("terminated", "Ended by SIGTERM, which neither the scheduler's state nor the log explains",
                 certain=False),
    24: EndCause("cpu-time-limit", "Killed at its limit of CPU time (ulimit -t)", ("ulimit -t  # in the job",)),
    25: EndCause("file-too-large", "Killed at the largest size of a file that is allowed (ulimit -f)",
                 ("ulimit -f  # in the job",)),
}  # fmt: skip
"""By the signal that killed the rank that failed first."""

EXIT_CODES: dict[int, EndCause] = {
    126: EndCause("not-executable", "The program cannot be executed (exit code 126)",
                  ("ls -l PROGRAM",), certain=False),
    127: EndCause("command-missing", "The program, or one that it starts, does not exist on the node (exit code 127)",
                  ("command -v PROGRAM  # on the node",), certain=False),
}  # fmt: skip
"""By exit code, as shells use it."""

TRAINER_EXIT_CODES: dict[int, EndCause] = {
    2: EndCause("usage-error", "The trainer does not accept a flag or a variable of its environment: {message}",
                ("hpcjobs logs {job}",)),
    10: EndCause("world-size", "The processes that started are not the world that the job requested",
                 ("srun --mpi=list ; hpcjobs sites show {site}",)),
    11: EndCause("rendezvous-timeout", "The ranks did not find each other", ("hpcjobs fabric --site {site}",)),
    12: EndCause("out-of-memory", "The device or the node had not enough memory",
                 ("hpcjobs logs {job}  # names which: a GPU needs a smaller batch, the node more --mem",)),
    13: EndCause("not-a-number", "The loss became infinite or no number", ("a smaller learning rate, or clipping",)),
    14: EndCause("file-missing", "A file or folder of data does not exist on the node"),
    15: EndCause("data-unreadable", "A file of data cannot be read as what it should be"),
    16: EndCause("data-differs", "The ranks see different data"),
    17: EndCause("checkpoint-unusable", "No checkpoint can be loaded", ("ls -l {run_dir}/checkpoints",)),
    18: EndCause("peer-lost", "Another rank was lost in the middle of the run", ("hpcjobs fabric --site {site}",)),
    19: EndCause("standstill", "No rank made a step for too long", ("hpcjobs fabric --site {site}",)),
    20: EndCause("disk-full", "The run folder could not be written any more", ("df -h {run_dir} ; quota -s",)),
    22: EndCause("gpu-broken", gpu_errors.BROKEN.text, ("{again} --exclude {host}  # and tell the administrators",)),
    23: EndCause("gpu-configuration", "GPUs, ranks, network interface or versions of NCCL do not fit together",
                 ("hpcjobs logs {job}  # names what does not fit",)),
    21: EndCause("image-failed", "The container image cannot be started on the node",
                 ("hpcjobs container check IMAGE",)),
}  # fmt: skip
"""By exit code of the bundled trainers (docs/trainers.md)."""
