"""Exit codes of trainers, and the errors that carry them.

    TrainerError
    ├── UsageError          2   a flag or an environment variable can't be right
    ├── WorldMismatch      10   the processes that started are not the world the job asked for
    ├── RendezvousError    11   the processes did not find each other
    ├── OutOfMemory        12   the device or the host ran out of memory
    ├── LossNotFinite      13   the loss became NaN or infinite
    ├── MissingData        14   a data file or folder is not there
    ├── BadData            15   a data file is there but can't be read as what it should be
    ├── UnequalData        16   ranks see different data
    ├── BadCheckpoint      17   no checkpoint can be loaded
    ├── PeerLost           18   another process went away in the middle of the run
    ├── Standstill         19   no rank has made a step for too long
    ├── StorageFault       20   the run folder can't be written any more
    ├── GpuFault           22   a GPU of this node has a hardware fault
    ├── BadConfiguration   23   GPUs, ranks, network interface or versions of NCCL don't fit together
    ├── Requeue            85   saved and stopped on request; no failure
    └── AlreadyReported     *   another rank has reported it; the code is that rank's

Anything else is a bug and ends with a traceback and code 1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    CRASH = 1
    USAGE = 2
    WORLD_MISMATCH = 10
    RENDEZVOUS = 11
    OUT_OF_MEMORY = 12
    LOSS_NOT_FINITE = 13
    MISSING_DATA = 14
    BAD_DATA = 15
    UNEQUAL_DATA = 16
    BAD_CHECKPOINT = 17
    PEER_LOST = 18
    STANDSTILL = 19
    STORAGE = 20
    CONTAINER = 21  # from the job script: the image cannot be started on this node
    GPU_FAULT = 22
    CONFIGURATION = 23
    REQUEUE = 85


class TrainerError(Exception):
    """One line for the user: the request, what is wrong, and (the hint) what to change."""

    code: int = ExitCode.CRASH
    elected = False  # True: the ranks have agreed that this one tells the user

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = self.message if self.hint is None else f"{self.message}. Hint: {self.hint}"
        return " ".join(text.split())


class UsageError(TrainerError):
    code = ExitCode.USAGE


class WorldMismatch(TrainerError):
    code = ExitCode.WORLD_MISMATCH


class RendezvousError(TrainerError):
    code = ExitCode.RENDEZVOUS


class OutOfMemory(TrainerError):
    code = ExitCode.OUT_OF_MEMORY


class LossNotFinite(TrainerError):
    code = ExitCode.LOSS_NOT_FINITE


class MissingData(TrainerError):
    code = ExitCode.MISSING_DATA


class BadData(TrainerError):
    code = ExitCode.BAD_DATA


class UnequalData(TrainerError):
    code = ExitCode.UNEQUAL_DATA


class BadCheckpoint(TrainerError):
    code = ExitCode.BAD_CHECKPOINT


class PeerLost(TrainerError):
    code = ExitCode.PEER_LOST


class Standstill(TrainerError):
    code = ExitCode.STANDSTILL


class StorageFault(TrainerError):
    code = ExitCode.STORAGE


class GpuFault(TrainerError):
    code = ExitCode.GPU_FAULT


class BadConfiguration(TrainerError):
    code = ExitCode.CONFIGURATION


class Requeue(TrainerError):
    """All ranks have saved and leave together; the job script starts them again."""

    code = ExitCode.REQUEUE
    elected = True


class AlreadyReported(TrainerError):
    """Another rank has reported the error; this one ends with the same code and prints nothing."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
