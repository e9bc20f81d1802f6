"""The jobs of a site: from sacct; without it from squeue and scontrol, or from the files of the jobs.

sacct is asked day by day. A block with one record per line goes to polars unchanged, which is much faster. Other
blocks are split by `Table.split`. Lines without a record are counted, named and left out.

A job belongs to the day of its end. Parts of a day that `cache` keeps are not read again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import PIPE
from typing import Final, NamedTuple, TypeVar

import msgspec
import polars as pl

from hpcjobs.errors import RequestError, SchedulerError, nearest
from hpcjobs.files import user_name
from hpcjobs.jobstats.cache import AttemptStore, Store, Window, closed_until, days
from hpcjobs.jobstats.columns import CLUSTER, Doubt, Doubts, JobFilter, choose
from hpcjobs.jobstats.derive import JOB_KEY, REQUEUE_S, SCHEMA, USE, derive, drop_revoked, merge_attempts, number_uses
from hpcjobs.jobstats.fold import COUNTS, fold, unused_fields
from hpcjobs.jobstats.usage import add_goodput, add_gpu_usage, add_running_usage
from hpcjobs.processes.programs import Runner, run, start
from hpcjobs.record import MANIFEST
from hpcjobs.record.manifest import read_manifest
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import read_usable
from hpcjobs.run.status import is_ours, kept_or_written, statuses
from hpcjobs.scheduler.base import JobRecord, State, connect
from hpcjobs.scheduler.slurm.client import split_ids
from hpcjobs.scheduler.slurm.parse import CONTROL, SEPARATOR, Table, new_separator, parse_scontrol
from hpcjobs.site.library import site_or_cluster
from hpcjobs.site.models import Site
from hpcjobs.slurm_commands import list_accounted, list_accounted_fields, list_clusters, question_env, show_job
from hpcjobs.units import memory_bytes, parent_id, task_ids, time_limit_s

Part = TypeVar("Part")
_SEPARATOR: Final = SEPARATOR.encode()
_CONTROL: Final = CONTROL.encode().replace(_SEPARATOR, b"")
_NUMBERS: Final = dict.fromkeys(COUNTS, pl.Int64)


def frames(
    blocks: Iterable[bytes], table: Table, doubts: Doubts, *, without: Collection[str] = ()
) -> Iterator[pl.DataFrame]:
    """One frame per block, in the order of the blocks; null where sacct left a column empty.

    ``without``: columns that the frames need not have.

    A second thread reads the next block while the caller works on this one.
    """
    source = _read_frames(blocks, table, doubts, without)
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(next, source, None)
        try:
            while (frame := ahead.result()) is not None:
                ahead = reader.submit(next, source, None)
                yield frame
        finally:
            ahead.cancel() or wait([ahead])
            source.close()


def _read_frames(
    blocks: Iterable[bytes], table: Table, doubts: Doubts, without: Collection[str]
) -> Generator[pl.DataFrame, None, None]:
    rest = b""
    for block in blocks:
        end = block.rfind(b"\n") + 1
        lines, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
        frame = _frame_of_lines(lines, table, without)
        if frame is None and lines:
            split = table.split(lines.decode("utf-8", "replace"))
            if len(table.separator) == 1:
                doubts.add("put together from several lines", (_start(record, table) for record in split.merged))
            doubts.add("not the columns asked for", (_start(text, table) for text in split.refused))
            rest = split.rest.encode() + rest
            text = "".join(f"{record}\n" for record in split.records)
            frame = _frame(text.encode(), table, without) if text else None
        if frame is not None and len(frame):
            yield frame
    if rest.strip():
        doubts.add("truncated", [_start(rest.decode("utf-8", "replace"), table)])


def _frame_of_lines(lines: bytes, table: Table, without: Collection[str]) -> pl.DataFrame | None:
    """The frame, if every line is one record.

    polars refuses a line with too many separators. So if the total number of separators fits the number of records,
    each line has the right number, and no name contains a separator.
    """
    if not lines:
        return None
    one_character = lines if len(table.separator) == 1 else lines.translate(None, delete=_CONTROL)
    for types in (_NUMBERS, {}):  # a column of numbers that contains a word is read as text
        try:
            frame = _read_csv(one_character, table, types, without)
        except (pl.exceptions.ComputeError, pl.exceptions.SchemaError):
            continue
        sound = lines.count(table.separator.encode()) == len(frame) * (len(table.columns) - 1)
        return frame if sound else None
    return None


def _start(record: str, table: Table) -> str:
    """The start of a record, for people."""
    return record[:160].replace(table.separator, "|").strip().replace("\n", " ")


def _frame(lines: bytes, table: Table, without: Collection[str]) -> pl.DataFrame:
    """The frame of records with characters of the separator in names; all columns as text."""
    separator = table.separator.encode()
    if len(separator) > 1:  # polars splits at one character
        lines = lines.replace(separator, b"\0").replace(_SEPARATOR, b" ").replace(b"\0", _SEPARATOR)
        lines = lines.translate(None, delete=_CONTROL)
    return _read_csv(lines, table, {}, without)


def _read_csv(
    lines: bytes, table: Table, types: Mapping[str, type[pl.DataType]], without: Collection[str]
) -> pl.DataFrame:
    rows = pl.scan_csv(
        lines,
        separator=table.separator[0],
        has_header=False,
        quote_char=None,
        schema={name: types.get(name, pl.String) for name in table.columns},
    )
    return rows.select(name for name in table.columns if name not in without).collect()


def stream(argv: Sequence[str], *, env: Mapping[str, str] | None = None, block_bytes: int = 5 << 20) -> Iterator[bytes]:
    """Standard output of ``argv`` in blocks as it comes: for answers too large to hold.

    Raises CommandMissingError: the program is not on PATH. SchedulerError: it ended with a code other than 0 (after its
    output has been given).
    """
    with tempfile.TemporaryFile() as errors:
        with start(argv, env=env, stdout=PIPE, stderr=errors) as process:
            assert process.stdout is not None
            try:
                while block := process.stdout.read(block_bytes):
                    yield block
            except GeneratorExit:
                process.kill()
                raise
        if process.returncode != 0:
            errors.seek(0)
            message = errors.read().decode("utf-8", "replace").strip() or "(nothing)"
            raise SchedulerError(f"{argv[0]} refused (exit code {process.returncode}): {message}")


class AccountingQuery(NamedTuple):
    """Whose jobs, and from when to when (seconds since 1970). ``users`` None: everybody's."""

    site: str
    since: float
    until: float
    users: tuple[str, ...] | None
    slurm_conf: str | None = None
    cluster: str | None = None


class Sacct:
    """The accounting of one cluster."""

    def __init__(
        self,
        query: AccountingQuery,
        *,
        runner: Runner = run,
        streamer: Callable[..., Iterator[bytes]] = stream,  # tests put a recorded answer here
        with_cluster: bool = False,
    ) -> None:
        self._query, self._with_cluster = query, with_cluster
        self._runner, self._stream = runner, streamer
        self._env = question_env(query.slurm_conf)
        self.windows_queried = 0
        """Windows that were read from sacct; the others were in the cache."""

    def attempts(self, doubts: Doubts) -> Iterator[pl.DataFrame]:
        """All columns of the attempts that `parts` selects."""
        yield from self.parts(AttemptStore(*self.identity(), *self._columns()), doubts)

    def parts(self, store: Store[Part], doubts: Doubts, *, only: Collection[str] | None = None) -> Iterator[Part]:
        """Ended attempts by the day of their end; of the last day also jobs that ended later, or have not ended.

        The end of the last day is always read from sacct: its jobs may have ended since.

        Args:
            only: columns that the store needs.

        Raises:
            SchedulerError: sacct refused, or lacks a column. CommandMissingError: sacct is not installed.
        """
        columns, now = self._columns(), time.time()
        every = list(days(self._query.since, self._query.until, now=now))
        for number, day in enumerate(every):
            last = number == len(every) - 1
            closed_windows = store.windows(day)
            if last and closed_windows and closed_windows[-1].end == day.end:
                closed_windows = []
            yield from map(store.read, closed_windows)
            begin = closed_windows[-1].end if closed_windows else day.begin
            if begin == day.end:
                continue
            self.windows_queried += 1
            answer = self._rows(columns, doubts, users=self._query.users, since=begin, until=day.end, only=only)
            closed = min(day.end, max(begin, closed_until(now)))
            if closed > begin:
                yield store.keep(Window(begin, closed), answer.filter(pl.col("ended").is_between(begin, closed - 1)))
            if closed < day.end:
                yield store.keep(None, answer.filter(pl.col("ended").is_between(closed, day.end - 1)))
            if last:
                yield store.keep(None, answer.filter(pl.col("ended").is_null() | (pl.col("ended") >= day.end)))

    def of_jobs(self, job_ids: Sequence[str], doubts: Doubts) -> Iterator[pl.DataFrame]:
        """Every attempt of these jobs, whenever they ran and whoever's they are."""
        columns = self._columns()
        for portion in list(split_ids(job_ids)) or [[]]:
            yield self._rows(columns, doubts, users=None, since=0, jobs=portion)

    def _columns(self) -> tuple[str, ...]:
        answer = self._runner(list_accounted_fields(), env=self._env)
        if answer.code != 0:
            raise SchedulerError(f"sacct refused (exit code {answer.code}): {(answer.err or answer.out).strip()}")
        return choose(answer.out, (CLUSTER,) if self._with_cluster else ())

    def identity(self) -> tuple[str, ...]:
        """Key of cached days: two clusters, or two sets of users, never share them."""
        query = self._query
        conf = query.slurm_conf or os.environ.get("SLURM_CONF", "")
        return query.site, conf, query.cluster or "", "*" if query.users is None else ",".join(query.users)

    def _rows(
        self,
        columns: Sequence[str],
        doubts: Doubts,
        *,
        users: Sequence[str] | None,
        since: float,
        until: float | None = None,
        jobs: Sequence[str] = (),
        only: Collection[str] | None = None,
    ) -> pl.DataFrame:
        table = Table(tuple(columns), new_separator())
        argv = list_accounted(
            *table,
            jobs=jobs,
            users=users,
            since=since,
            until=until,
            clusters=self._query.cluster,
            steps=True,
            attempts=True,
        )
        rows = frames(self._stream(argv, env=self._env), table, doubts, without=unused_fields(only))
        attempts = list(fold(rows, doubts, only=only))
        if not attempts:  # no rows, with the columns that rows would have
            one = pl.DataFrame({name: ["0"] for name in columns}, schema=dict.fromkeys(columns, pl.String))
            return next(fold([one], Doubts(), only=only)).clear()
        return pl.concat(attempts)


class ResourceRequest(NamedTuple):
    """Request of a job, from the manifest of its run folder. None: not set."""

    user: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int | None = None
    tasks: int | None = None
    cpus: int | None = None
    gpus: int = 0
    mem_bytes: int | None = None
    time_limit_s: int | None = None


class _RequestedResources(msgspec.Struct):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem: str | None = None
    time: str | None = None


def read_request(run_dir: Path) -> ResourceRequest:
    """Read the request from the manifest of ``run_dir``; empty without a manifest."""
    return read_usable(run_dir / MANIFEST, lambda: _read_request(run_dir)) or ResourceRequest()


def _read_request(run_dir: Path) -> ResourceRequest:
    manifest = read_manifest(run_dir)
    job, resources = manifest.request, msgspec.convert(manifest.request.resources, _RequestedResources)
    nodes, tasks = job.nodes, job.nodes * job.ntasks_per_node
    return ResourceRequest(
        user=manifest.user,
        partition=resources.partition,
        account=resources.account,
        qos=resources.qos,
        nodes=nodes,
        tasks=tasks,
        cpus=tasks * (resources.cpus_per_task or 1),
        gpus=nodes * (resources.gpus_per_node or 0),
        mem_bytes=nodes * memory_bytes(resources.mem) or None if resources.mem else None,
        time_limit_s=time_limit_s(resources.time),
    )


def to_frame(records: Iterable[tuple[JobRecord, Entry | None]], site: Site) -> pl.DataFrame:
    """Rows for `derive.derive`; the request is read from the run folder where there is one."""
    rows = [_row(record, entry, site) for record, entry in records]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _row(record: JobRecord, entry: Entry | None, site: Site) -> dict[str, object]:
    request = read_request(Path(entry.run_dir)) if entry is not None else ResourceRequest()
    submitted = record.submitted if record.submitted is not None else (entry.submitted if entry else None)
    rss, waited_until = record.max_rss_bytes, record.started if record.started is not None else record.ended
    return {
        "job_id": record.job_id,
        "job_id_raw": record.job_id,
        "name": record.name or (entry.name if entry else None),
        "user": record.user or request.user or (entry.user if entry else None),
        "account": request.account,
        "partition": record.partition or request.partition,
        "qos": request.qos,
        "state": record.state.value,
        "reason": record.reason,
        "exit_code": record.exit_code,
        "signal": record.signal,
        "submitted": _round(submitted),
        "eligible": _round(submitted),
        "started": _round(record.started),
        "ended": _round(record.ended),
        "queue_wait_s": _seconds_between(submitted, waited_until),
        "held_s": None,
        "elapsed_s": _round(record.elapsed_s)
        if record.elapsed_s is not None
        else _seconds_between(record.started, record.ended),
        "time_limit_s": request.time_limit_s if record.time_limit_s is None else round(record.time_limit_s),
        "nodes": record.nnodes or request.nodes,
        "tasks": request.tasks,
        "cpus": request.cpus,
        "gpus": request.gpus if entry is not None else None,
        "node_list": record.node_list,
        "mem_requested_bytes": request.mem_bytes,
        # The local scheduler has the largest process only: x tasks is the same upper estimate as sacct's.
        "mem_used_bytes": rss * (request.tasks or 1) if rss is not None else None,
        "mem_per_node_bytes": rss * (request.tasks or 1) if rss is not None else None,
        "max_rss_bytes": rss,
        "cpu_s": record.cpu_s,
        "steps": None,
        "site": site.name,
        "source": record.source,
        "run_dir": entry.run_dir if entry is not None else None,
    }


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)


def _seconds_between(begin: float | None, end: float | None) -> int | None:
    return None if begin is None or end is None else max(0, round(end - begin))


_IDS_PER_QUERY = 5000
"""Linux takes arguments of 128 KiB each."""


class AccountingTable(NamedTuple):
    """Jobs (one row each, `columns.COLUMNS`) and their attempts, doubtful rows, reasons why a source was not used."""

    jobs: pl.DataFrame
    doubts: list[Doubt]
    notes: list[str]
    attempts: pl.DataFrame = pl.DataFrame()
    """Every attempt of ``jobs``, a row each."""


def gather(job_filter: JobFilter, *, site: str | Site | None = None) -> AccountingTable:
    """The jobs of one site, one row each.

    Raises ConfigError: no such site. SchedulerError: no site answers at all.
    """
    jobs_site = site if isinstance(site, Site) else site_or_cluster(site)
    doubts, notes = Doubts(), list[str]()
    if not jobs_site.kind.has_accounting:
        entries = [entry for entry in index.entries() if not entry.kind.has_accounting]
        known = statuses(_select_entries(entries, job_filter))
        frame = to_frame(((record, one.entry) for one in known for record in one.records), jobs_site)
        jobs = derive(frame, jobs_site, source=jobs_site.scheduler)
    else:
        try:
            jobs = _query_whole_jobs(job_filter, jobs_site, doubts)
        except SchedulerError as error:
            reason = error.message.splitlines()[0]
            notes.append(f"no accounting by sacct ({reason}); jobs as the queue and their own files tell")
            jobs = derive(_query_without_sacct(job_filter, jobs_site, notes), jobs_site)
    attempts = number_uses(drop_revoked(jobs))
    jobs = filter_jobs(merge_attempts(attempts), job_filter)
    jobs = jobs.with_columns(run_dir=pl.coalesce("run_dir", _run_dirs(jobs, _entries_by_id(jobs_site))))
    attempts = attempts.join(jobs, on=[*JOB_KEY, USE], how="semi", nulls_equal=True).drop(USE)
    jobs = add_gpu_usage(add_goodput(jobs.drop(USE)), jobs_site)
    return AccountingTable(jobs, doubts.by_frequency(), notes, attempts)


def _entries_by_id(site: Site) -> dict[str, list[Entry]]:
    by_id: dict[str, list[Entry]] = {}
    for entry in index.entries():
        if entry.site == site.name:
            by_id.setdefault(entry.job_id, []).append(entry)
    return by_id


def _find_own(record: JobRecord, entries: dict[str, list[Entry]]) -> Entry | None:
    """Find the entry of the record's job: a cluster that lost its state gives an id to several jobs."""
    return next((entry for entry in entries.get(parent_id(record.job_id), ()) if is_ours(entry, record)), None)


def _run_dirs(jobs: pl.DataFrame, entries: dict[str, list[Entry]]) -> pl.Series:
    rows = jobs.select("job_id", "name", "user", "submitted", "started", "ended").iter_rows(named=True)
    own = (_find_own(JobRecord(state=State.UNKNOWN, source="sacct", **row), entries) for row in rows)
    return pl.Series([None if entry is None else entry.run_dir for entry in own], dtype=pl.String)


def _query_whole_jobs(job_filter: JobFilter, site: Site, doubts: Doubts) -> pl.DataFrame:
    """Every attempt of the jobs that ended since then, also earlier attempts.

    A requeue is a new submission. So if the first attempt here was submitted before ``since``, an earlier one may have
    ended before ``since``. These jobs are queried by id.
    """
    attempts = pl.concat(list(query_attempts(job_filter, site, doubts)))
    if job_filter.job_ids is not None:
        return attempts
    first = attempts.group_by("job_id").agg(pl.col("submitted").min())
    cut = first.filter(pl.col("submitted") < int(job_filter.since) + REQUEUE_S)["job_id"].to_list()
    parents = sorted(set(map(parent_id, cut)))
    parts = [
        frame
        for n in range(0, len(parents), _IDS_PER_QUERY)
        for frame in query_attempts(job_filter._replace(job_ids=tuple(parents[n : n + _IDS_PER_QUERY])), site, doubts)
    ]
    others = attempts.filter(~pl.col("job_id").is_in(cut))
    return pl.concat([others, *(part.filter(pl.col("job_id").is_in(cut)) for part in parts)])


def query_attempts(job_filter: JobFilter, site: Site, doubts: Doubts) -> Iterator[pl.DataFrame]:
    """Attempts by sacct, a day at a time: for sums over more jobs than fit into memory.

    Raises SchedulerError: sacct does not answer.
    """
    sacct = open_sacct(job_filter, site)
    if job_filter.job_ids is None:
        frames = sacct.attempts(doubts)
    else:
        frames = sacct.of_jobs(sorted(set(map(parent_id, job_filter.job_ids))), doubts)
    for frame in frames:
        yield derive(add_running_usage(frame, slurm_conf=site.slurm_conf), site)


def open_sacct(job_filter: JobFilter, site: Site) -> Sacct:
    """The accounting of the site for the users and times of the filter.

    Raises RequestError: slurmdbd knows no cluster of that name.
    """
    until = time.time() if job_filter.until is None else job_filter.until
    cluster = job_filter.cluster or os.environ.get("SLURM_CLUSTERS")  # which squeue and sbatch heed and sacct does not
    if job_filter.cluster not in (None, "all"):
        _check_clusters(job_filter.cluster or "", site)
    query = AccountingQuery(site.name, job_filter.since, until, job_filter.users, site.slurm_conf, cluster or None)
    return Sacct(query, with_cluster=bool(cluster))


def _check_clusters(names: str, site: Site) -> None:
    """Refuse a cluster that slurmdbd does not know: sacct would succeed with an empty list."""
    answer = run(list_clusters(), env=question_env(site.slurm_conf))
    known = answer.out.split() if answer.code == 0 else []
    for name in names.split(","):
        if known and name not in known:
            raise RequestError(f"--cluster {name}: slurmdbd has no such cluster", hint=nearest(name, known))


def _select_entries(entries: list[Entry], job_filter: JobFilter) -> list[Entry]:
    if job_filter.job_ids is None:
        return entries
    ids = set(map(parent_id, job_filter.job_ids))
    return [entry for entry in entries if entry.job_id in ids]


def _query_without_sacct(job_filter: JobFilter, site: Site, notes: list[str]) -> pl.DataFrame:
    """squeue for live jobs, scontrol for jobs that ended lately, then the files of jobs submitted with hpcjobs."""
    known = _entries_by_id(site)
    slurm = connect(site.scheduler, site.slurm_conf)
    records: dict[tuple[str, str | None], tuple[JobRecord, Entry | None]] = {}
    try:
        for record in [*slurm.queue(), *_query_scontrol(site)]:
            own = _find_own(record, known)
            records.setdefault((record.job_id, None if own is None else own.run_dir), (record, own))
    except SchedulerError as error:
        notes.append(f"the queue does not answer either ({error.message.splitlines()[0]})")
        if not known:
            raise
    # Of an array the queue knows the tasks that wait, run or have just ended: the others have their own files.
    for entry in _select_entries([entry for entries in known.values() for entry in entries], job_filter):
        in_queue = any(run_dir == entry.run_dir for _, run_dir in records)
        for record in kept_or_written(entry):
            records.setdefault((record.job_id, entry.run_dir), (record, entry))
        if not in_queue and all(run_dir != entry.run_dir for _, run_dir in records):
            lost = JobRecord(state=State.UNKNOWN, job_id=entry.job_id, source="index")
            records[entry.job_id, entry.run_dir] = lost, entry
    mine = pl.col("user").is_null() & (pl.col("source") == "squeue")  # squeue listed mine; scontrol lists every user's
    return to_frame(records.values(), site).with_columns(user=pl.when(mine).then(pl.lit(user_name())).otherwise("user"))


def _query_scontrol(site: Site) -> list[JobRecord]:
    """Everybody's jobs that slurmctld still knows: until some minutes after their end."""
    answer = run(show_job(siblings=True), env=question_env(site.slurm_conf))
    if answer.code != 0:
        raise SchedulerError(f"scontrol refused (exit code {answer.code}): {answer.err.strip()}")
    return parse_scontrol(answer.out)


def filter_jobs(jobs: pl.DataFrame, job_filter: JobFilter) -> pl.DataFrame:
    """Those of ``jobs`` that the filter names."""
    keep = pl.lit(True)
    if job_filter.job_ids is None:
        last = pl.coalesce("ended", pl.when(pl.col("source") == "index").then("submitted"))
        keep = last.is_null() | (last >= int(job_filter.since))
        if job_filter.until is not None:
            keep &= pl.col("submitted") < int(job_filter.until)
    else:
        # The id itself is among them, or its job, or one of the pending tasks that it stands for.
        ids = set(job_filter.job_ids)
        chosen = [one for one in jobs["job_id"] if not ids.isdisjoint({one, parent_id(one), *task_ids(one)})]
        keep &= pl.col("job_id").is_in(chosen)
    if job_filter.users is not None:
        keep &= pl.col("user").is_in(job_filter.users)
    if job_filter.account is not None:
        keep &= pl.col("account") == job_filter.account
    if job_filter.states is not None:
        keep &= pl.col("state").is_in([state.upper() for state in job_filter.states])
    if job_filter.name is not None:
        names = jobs["name"].unique().drop_nulls().to_list()
        keep &= pl.col("name").is_in([name for name in names if fnmatchcase(name, job_filter.name)])
    return jobs.filter(keep)
