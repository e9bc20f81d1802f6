"""Describes how a job or a rank ended: its exit code, or the signal by its name."""

from __future__ import annotations

import signal as signals

_USUAL_CAUSES = {
    signals.SIGKILL: "often out of memory",
    signals.SIGSEGV: "a memory error in compiled code",
    signals.SIGBUS: "often a full /dev/shm, or a file that was cut short",
    signals.SIGILL: "often a program built for another CPU",
    signals.SIGABRT: "the program gave up by itself",
    signals.SIGFPE: "a division by zero in compiled code",
    signals.SIGXCPU: "its limit of CPU time",
    signals.SIGXFSZ: "its limit of file size",
}


SLURM_OUT_OF_MEMORY = 125
"""What Slurm reports as the signal of a step whose memory limit was exceeded: no signal has this number."""


def name_signal(number: int) -> str:
    """``SIGKILL``; ``signal 99`` where the number has no name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_signal(number: int) -> str:
    """``killed by signal 9 (SIGKILL), often out of memory``."""
    if number == SLURM_OUT_OF_MEMORY:
        return "killed by Slurm, out of memory"
    name = name_signal(number)
    cause = next((f", {cause}" for usual, cause in _USUAL_CAUSES.items() if usual == number), "")
    return f"killed by signal {number}{f' ({name})' if name.startswith('SIG') else ''}{cause}"


def signal_of(exit_code: int | None, signal: int | None = None) -> int | None:
    """The signal that ended a process: Slurm's, or that of a shell's exit code (128 and the signal); None: none did."""
    if signal:
        return signal
    number = (exit_code or 0) - 128
    return number if number in set(signals.Signals) else None


def describe_exit(exit_code: int | None, signal: int | None = None) -> str:
    """``exit code 3``, or ``killed by signal 9 (SIGKILL), often out of memory``; empty where nothing is known."""
    number = signal_of(exit_code, signal)
    if number is not None:
        return describe_signal(number)
    return "" if exit_code is None else f"exit code {exit_code}"
