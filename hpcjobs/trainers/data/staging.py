"""`--stage-to`: one rank of each node copies the data to the node's own disk, and all ranks read it there.

The others wait by the store of the launch, and not in a collective, whose time limit a copy may exceed. A rank that
copies counts up in the store; rank 0 looks after all of them, and the store ends with rank 0.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore

from hpcjobs.files import write_beside
from hpcjobs.runtime.exits import PeerLost, TrainerError, UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.data.node_copy import CopyProgress, NodeCopy
from hpcjobs.trainers.distributed.process_group import RankGroup

PROGRESS_FILE = "staging.json"
"""In the run folder while data is copied: `hpcjobs wait` shows it."""
LOG_S = 10.0
FIRST_POLL_S, MOST_POLL_S = 0.02, 1.0
SILENT_S = 60.0
"""A count that stands still for so long belongs to a rank that no longer runs."""


def stage_data(config: Config, group: RankGroup) -> Config:
    """The flags with the names of the copies.

    Raises:
        UsageError: --tokens names single files, which are not all that a copy needs, or a copy cannot be made.
        PeerLost: the rank that copies on a node no longer runs.
    """
    if config.stage_to is None:
        return config
    files = [path for path in config.tokens if Path(path).is_file()]
    if files:
        raise UsageError(f"--stage-to copies whole folders of --tokens, and {files[0]} is a file", hint="its folder")
    named = (*config.text, *config.tokens, *(() if config.data is None else (config.data,)))
    copies = Staging(group, Path(config.stage_to)).stage([Path(path) for path in named])
    place = {path: copies.get(str(Path(path)), path) for path in named}
    return replace(
        config,
        data=None if config.data is None else place[config.data],
        text=tuple(place[path] for path in config.text),
        tokens=tuple(place[path] for path in config.tokens),
    )


@dataclass
class Staging:
    """One rank's part in copying data to the nodes."""

    group: RankGroup
    folder: Path
    silent_s: float = SILENT_S
    _began: float = field(default_factory=time.monotonic)
    _beats: int = 0
    _watch: StagingWatch | None = None

    def __post_init__(self) -> None:
        self._store = PrefixStore("staging", self.group.store)
        self._copier = self.group.hosts.index(self.group.hosts[self.group.rank])
        if self.group.rank == 0:
            copiers = sorted({self.group.hosts.index(host) for host in self.group.hosts})
            self._watch = StagingWatch(self.group, self._store, copiers, self.silent_s)

    def stage(self, sources: Sequence[Path]) -> dict[str, str]:
        """The copy of each source that is there, once every node has its own."""
        if self.group.rank == self._copier:
            try:
                self._copy(sources)
            except TrainerError as error:
                self._store.set("error", json.dumps([int(error.code), str(error)]))
                if self._watch is not None:
                    self._watch.close()
                raise
        poll_s = FIRST_POLL_S
        while not self._store.check(["ready"]):
            self._look()
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MOST_POLL_S)
        copies: dict[str, str] = json.loads(self._store.get(f"copies/{self._copier}"))
        return copies

    def _copy(self, sources: Sequence[Path]) -> None:
        """What is not there is the workload's to report."""
        copy = NodeCopy(self.folder, self._report)
        try:
            copies = copy.copy([source for source in sources if source.exists()])
        except OSError as error:
            where = f"rank {self.group.rank} on {self.group.hosts[self.group.rank]}"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "a folder on a local disk with space" if full else "the data must be readable, and stay as it is"
            raise UsageError(f"--stage-to {self.folder}: {error} ({where})", hint=hint) from error
        targets = {str(source): str(target) for source, target in copies.items()}
        self._store.set(f"copies/{self.group.rank}", json.dumps(targets))
        seconds, done = time.monotonic() - self._began, copy.progress
        self.group.log(
            f"staged {len(copies)} of {len(sources)} to {self.folder} in {seconds:.1f} s: {done.files:,} files, "
            f"{done.size_bytes / 1e9:.3g} GB, {copy.copied_files:,} of them copied now"
        )

    def _report(self, progress: CopyProgress) -> None:
        self._beats += 1
        self._store.set(f"progress/{self.group.rank}", json.dumps({"beats": self._beats, **asdict(progress)}))
        self._look()

    def _look(self) -> None:
        """Raise what another rank has reported, or what rank 0 sees."""
        if self._store.check(["error"]):
            code, text = json.loads(self._store.get("error"))
            error = TrainerError(text)
            error.code = code
            raise error
        if self._watch is None:
            return
        try:
            self._watch.look()
        except TrainerError as error:
            self._store.set("error", json.dumps([int(error.code), str(error)]))
            self._watch.close()
            raise


class StagingWatch:
    """Rank 0's look at the ranks that copy: progress in the log and the run folder, and whether each still runs."""

    def __init__(self, group: RankGroup, store: PrefixStore, copiers: Sequence[int], silent_s: float) -> None:
        self._group, self._store, self._copiers, self._silent_s = group, store, copiers, silent_s
        self._beats = dict.fromkeys(copiers, 0)
        self._silence_s = dict.fromkeys(copiers, 0.0)
        self._looked = self._logged = time.monotonic()
        folder = os.environ.get("HPCJOBS_RUN_DIR")
        self._file = None if folder is None else Path(folder) / PROGRESS_FILE

    def look(self) -> None:
        """Raise `PeerLost` where a rank has stopped counting; tell all where every node is ready."""
        now = time.monotonic()
        passed_s = min(now - self._looked, 2 * MOST_POLL_S)  # more: this process was suspended, as were the others
        self._looked = now
        pending = [rank for rank in self._copiers if not self._store.check([f"copies/{rank}"])]
        if not pending:
            self._store.set("ready", "")
            self.close()
            return
        progress = {rank: self._read(rank) for rank in pending}
        for rank, (beats, _) in progress.items():
            silent = beats == self._beats[rank] and rank != self._group.rank
            self._silence_s[rank] = self._silence_s[rank] + passed_s if silent else 0.0
            self._beats[rank] = beats
            if self._silence_s[rank] > self._silent_s:
                raise PeerLost(
                    f"rank {rank} on {self._group.hosts[rank]}, which copies data for --stage-to, has not reported "
                    f"for {self._silent_s:.0f} s",
                    hint="the node's log says whether it was killed",
                )
        if now - self._logged >= LOG_S:
            self._logged = now
            self._show({rank: one for rank, (_, one) in progress.items()})

    def close(self) -> None:
        """Nobody copies any more."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _read(self, rank: int) -> tuple[int, CopyProgress]:
        if not self._store.check([f"progress/{rank}"]):
            return 0, CopyProgress()
        fields = json.loads(self._store.get(f"progress/{rank}"))
        return fields.pop("beats"), CopyProgress(**fields)

    def _show(self, pending: dict[int, CopyProgress]) -> None:
        """The node that is furthest behind, and how many are ready."""
        rank, last = min(pending.items(), key=lambda item: item[1].size_bytes / max(1, item[1].total_bytes))
        host, ready = self._group.hosts[rank], len(self._copiers) - len(pending)
        self._group.log(f"staging: {ready} of {len(self._copiers)} nodes ready; {host}: {describe_progress(last)}")
        if self._file is not None:
            fields = {"nodes": len(self._copiers), "ready": ready, "host": host, **asdict(last)}
            try:
                write_beside(self._file, json.dumps(fields), mode=None, durable=False)
            except OSError as error:
                self._group.log(f"warning: the progress of staging is not shown by `hpcjobs wait`: {error}")
                self._file = None


def describe_progress(progress: CopyProgress) -> str:
    if progress.waits:
        return "waits for another job that makes the same copy"
    if not progress.total_bytes:
        return f"lists its files, {progress.files_total:,} so far"
    done, total = progress.size_bytes / 1e9, progress.total_bytes / 1e9
    return f"{progress.files:,} of {progress.files_total:,} files, {done:.3g} of {total:.3g} GB"
