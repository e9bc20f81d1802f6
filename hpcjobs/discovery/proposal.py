"""The content of a new site file: values with their origins, partitions, and questions. Every value is frozen."""

from __future__ import annotations

from typing import NamedTuple


class Answers(NamedTuple):
    """The user's answers by flags; ``None`` and ``()``: not answered."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    mpi: str | None = None
    interface: str | None = None
    modules: tuple[str, ...] = ()
    module_init: str | None = None
    conda: str | None = None
    venv: str | None = None
    container_runtime: str | None = None
    scratch: str | None = None
    run_root: str | None = None
    login: str | None = None


class ProposedEntry(NamedTuple):
    """One key of the file with its YAML value and the origin of the value."""

    key: str
    value: object
    origin: str


class PartitionEntry(NamedTuple):
    """One partition: its keys, and comments for the reader."""

    name: str
    entries: tuple[tuple[str, object], ...]
    notes: tuple[str, ...] = ()


class Omission(NamedTuple):
    """A partition that the user's jobs cannot use."""

    partition: str
    reason: str


class Question(NamedTuple):
    """An unknown value: the key, the command that shows it, and the flag that sets it."""

    key: str
    text: str
    command: str
    flag: str


class ProposedSite(NamedTuple):
    """A site file before it is written."""

    name: str
    entries: tuple[ProposedEntry, ...]
    partitions: tuple[PartitionEntry, ...]
    omissions: tuple[Omission, ...]
    notes: tuple[str, ...]
    """Facts that no key holds."""
    questions: tuple[Question, ...]
