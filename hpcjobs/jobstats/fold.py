"""Rows of sacct (jobs, array tasks, components, steps) folded into one row per attempt of a job.

sacct prints a job and then its steps. So steps belong to the job above them. This also separates the
attempts of a requeued job, which share every id.

A resize (``scontrol update job NumNodes=``) ends a row with the state RESIZING and begins another one, submitted at the
resize, whose start and time may be those of the complete job. Such a row is cut to its own part of the job.

Memory: the tasks of a step peak at different moments, and Slurm does not record the peak of their sum. So figures are
upper estimates: the sum of the peaks of the tasks of a step (TRESUsageInTot; AveRSS or MaxRSS x tasks in versions that
lack it), added up over the steps that ran at the same time, with the batch script, without the extern step. The memory
of a node counts only the steps that ran on it.
GPU utilization: the mean over the steps that used GPUs, weighted by their time and GPUs. The batch script, and a step
that ran at the same time as one that used GPUs, count only if they used some. Steps with more GPUs at once than the job
has (``srun --overlap``) share them: their use is added up, and the GPUs count once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import polars as pl

from hpcjobs.jobstats.columns import Doubts
from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.slurm.parse import (
    MOST_SECONDS,
    NO_NUMBER,
    NO_VALUE,
    NOTHING,
    UNIT_BYTES,
    count_gpus,
    read_bytes,
    read_exit,
    read_resource,
)
from hpcjobs.slurm_commands import hosts_of

_LARGEST: Final = 1 << 62
_NO_COUNT: Final = sorted(value for value in NO_VALUE if value < _LARGEST)
_BLANK: Final = [*NOTHING, *NO_NUMBER, *map(str, NO_VALUE)]


def read_counts(frame: pl.DataFrame, column: str, doubts: Doubts) -> pl.Series:
    """Whole numbers; a text that is neither a number nor one of Slurm's for no value is counted and left null.

    Null, too: Slurm's numbers for no value, and times that cannot be.
    """
    text = frame[column]
    if text.dtype == pl.Int64:
        return _without_no_value(text)
    numbers = text.cast(pl.Int64, strict=False)
    if numbers.null_count() > text.null_count():
        odd = frame.filter(text.is_not_null() & numbers.is_null() & ~text.is_in(_BLANK))
        if column.startswith(("MaxRSS", "AveRSS")):
            return read_sizes(text)
        doubts.add(f"{column} is no number", (f"{job}: {value!r}" for job, value in odd.select("JobID", column).rows()))
    return _without_no_value(numbers)


def _without_no_value(numbers: pl.Series) -> pl.Series:
    low, high = numbers.min(), numbers.max()
    if low is None or (isinstance(low, int) and isinstance(high, int) and low >= 0 and high < _NO_COUNT[0]):
        return numbers
    largest = int(MOST_SECONDS) if numbers.name in _TIMES else _LARGEST
    bad = numbers.is_in(_NO_COUNT) | (numbers < 0) | (numbers > largest)
    return numbers.set(bad.fill_null(False), None) if bad.any() else numbers


def read_sizes(text: pl.Series) -> pl.Series:
    """Bytes of ``123456``, ``218296K``, ``1.5G`` (powers of 1024)."""
    parts = text.str.to_uppercase().str.extract_groups(r"^(\d+(?:\.\d*)?)([KMGTP]?)[BN]?$").struct.unnest()
    number = parts.to_series(0).cast(pl.Float64, strict=False)
    unit = parts.to_series(1).replace_strict(UNIT_BYTES, default=None, return_dtype=pl.Float64)
    sizes: pl.Series = (number * unit).round().cast(pl.Int64, strict=False).alias(text.name)
    return sizes


def map_distinct(text: pl.Series, read: Callable[[str], object], dtype: type[pl.DataType]) -> pl.Series:
    """``read`` of each value, called once for each value there is: for columns that repeat themselves."""
    values = text.unique().drop_nulls().to_list()
    mapped: pl.Series = text.replace_strict(values, [read(value) for value in values], default=None, return_dtype=dtype)
    return mapped


def read_usage(text: pl.Series, resource: str) -> pl.Series:
    """Bytes of ``resource`` in a column like TRESUsageInTot, where no two rows are the same."""
    amounts = text.str.extract(rf"(?:^|,){resource}=([\d.]+[KMGTP]?)")
    numbers = amounts.cast(pl.Int64, strict=False)
    return numbers if numbers.null_count() == amounts.null_count() else read_sizes(amounts)


def clock_s(column: str) -> pl.Expr:
    """Seconds of ``1-02:03:04``, ``02:03:04``, ``03:04.567``."""
    clock = pl.col(column).str.extract_groups(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d*)?)$").struct
    days, hours, minutes, seconds = (clock.field(str(n)).cast(pl.Float64, strict=False) for n in (1, 2, 3, 4))
    return days.fill_null(0) * 86400 + hours.fill_null(0) * 3600 + minutes * 60 + seconds


def known_text(column: str) -> pl.Expr:
    """Replace sacct's spellings of a missing value by null."""
    return pl.when(~pl.col(column).is_in([*NOTHING])).then(pl.col(column))


_TIMES = ("Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw")
_OF_JOBS = (*_TIMES, "NNodes", "NCPUS", "MaxRSS", "ConsumedEnergyRaw", "Restarts")
_OF_STEPS = ("Start", "End", "ElapsedRaw", "NNodes", "NTasks", "MaxRSS", "AveRSS")
COUNTS: Final = tuple(dict.fromkeys((*_OF_JOBS, *_OF_STEPS)))
"""Columns of whole numbers."""
_TEXT_FIELDS = (
    *("JobIDRaw", "JobName", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Reason", "ReqMem"),
    *("ReqTRES", "AllocTRES", "NodeList", "TotalCPU", "Cluster"),
)
_USAGE = ("TRESUsageInTot", "TRESUsageInAve")
_EXTERN: Final = pl.col("JobID").str.ends_with(".extern")
_BESIDE: Final = _EXTERN | pl.col("JobID").str.ends_with(".batch") | pl.col("JobID").str.ends_with(".interactive")
_OF_ALL = ("job_id", "state", "_word", "submitted", "eligible", "started", "ended", "elapsed_s")
_PEAKS = ("tasks", "mem_used_bytes", "mem_per_node_bytes")
_LARGEST_J = 10**13
"""Above this a counter has overflowed: 2.8 GWh for one job."""
_NEVER = 1 << 34
"""The end of a step that has none, in seconds since 1970: in the year 2514."""


_ONLY_FOR: Final = {
    "Reason": {"reason"},
    "ExitCode": {"exit_code", "signal"},
    "TimelimitRaw": {"time_limit_s"},
    "NodeList": {"node_list", "mem_per_node_bytes"},
    "TRESUsageInAve": {"gpu_utilization", "gpu_mem_bytes"},
}
_ROWS_AT_ONCE = 25_000
"""A frame has a fixed cost in addition to the cost of its rows."""


def unused_fields(only: Collection[str] | None) -> frozenset[str]:
    """Columns of sacct that `fold` with ``only`` does not read."""
    return frozenset(name for name, columns in _ONLY_FOR.items() if only is not None and columns.isdisjoint(only))


def fold(
    frames: Iterable[pl.DataFrame], doubts: Doubts, *, only: Collection[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Attempts, a frame per frame; the last job of each waits for the next one, which may hold its steps.

    Args:
        only: the columns chosen; default all.
    """
    held: pl.DataFrame | None = None
    for part in _join_small(frames):
        frame = part if held is None else pl.concat([held, part], how="vertical_relaxed")
        starts = frame["JobID"].str.contains(".", literal=True).not_().arg_true()
        last = int(starts[-1]) if len(starts) else 0
        held = frame.slice(last)
        if last:
            yield _fold_rows(frame.slice(0, last), doubts, only)
    if held is not None and len(held):
        yield _fold_rows(held, doubts, only)


def _join_small(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The rows of several frames in one, up to `_ROWS_AT_ONCE`."""
    waiting: list[pl.DataFrame] = []
    for frame in frames:
        waiting.append(frame)
        if sum(map(len, waiting)) >= _ROWS_AT_ONCE:
            blocks = [pl.concat(waiting, how="vertical_relaxed")]
            waiting.clear()
            del frame
            yield blocks.pop()  # whoever works on it is the only one to hold it
    if waiting:
        yield pl.concat(waiting, how="vertical_relaxed")


def _fold_rows(frame: pl.DataFrame, doubts: Doubts, only: Collection[str] | None) -> pl.DataFrame:
    frame = _with_ids(frame, doubts).with_columns(_job=pl.col("JobID").str.contains(".", literal=True).not_())
    frame = frame.with_columns(_group=pl.col("_job").cum_sum())
    jobs = frame.lazy().filter("_job").select("JobID", "_group", *_TEXT_FIELDS, *_OF_JOBS).collect()
    owner = pl.lit(pl.concat([pl.Series([None], dtype=pl.String), jobs["JobID"]])).gather(pl.col("_group"))
    steps = (
        frame.lazy()
        .filter(~pl.col("_job"))
        .select("JobID", "_group", "TotalCPU", "AllocTRES", "NodeList", *_USAGE, *_OF_STEPS)
        .with_columns(_own=pl.col("JobID").str.starts_with(owner + ".").fill_null(False))
        .collect()
    )
    jobs = _parse_counts(jobs, _OF_JOBS, doubts)
    steps = _parse_counts(_drop_orphan_steps(steps, doubts), _OF_STEPS, doubts)
    cpu_missing = jobs["TotalCPU"].is_in(["", "00:00:00"]).any() or jobs["TotalCPU"].has_nulls()
    summed = _steps(steps, jobs, only, cpu_missing=bool(cpu_missing))
    return _jobs(jobs.join(summed, on="_group", how="left", maintain_order="left"), doubts, only)


def _drop_orphan_steps(steps: pl.DataFrame, doubts: Doubts) -> pl.DataFrame:
    """Drop steps that do not follow their job: the row of their own job is missing."""
    own = steps["_own"]
    if own.all():
        return steps
    doubts.add("step without its job", steps.filter(~own)["JobID"].to_list())
    return steps.filter(own)


def _with_ids(frame: pl.DataFrame, doubts: Doubts) -> pl.DataFrame:
    """Without rows that no job id begins, and with every column a later version may lack."""
    sound = frame["JobID"].str.contains(r"^\d").fill_null(False)
    if not sound.all():
        odd = frame.filter(~sound)
        doubts.add("no job id", ("|".join(str(v) for v in row[:4] if v is not None) for row in odd.iter_rows()))
        frame = frame.filter(sound)
    missing = [name for name in (*_TEXT_FIELDS, *COUNTS, *_USAGE) if name not in frame.columns]
    return frame.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in missing) if missing else frame


def _parse_counts(frame: pl.DataFrame, columns: Sequence[str], doubts: Doubts) -> pl.DataFrame:
    typed = [name for name in columns if frame.schema[name] == pl.Int64]
    usual = frame.select(
        (pl.col(name).is_null() | pl.col(name).is_between(0, _NO_COUNT[0] - 1)).all() for name in typed
    )
    rest = [name for name in columns if name not in typed or not usual[name].item()]
    return frame.with_columns(read_counts(frame, name, doubts) for name in rest) if rest else frame


def _steps(steps: pl.DataFrame, jobs: pl.DataFrame, only: Collection[str] | None, *, cpu_missing: bool) -> pl.DataFrame:
    """Sum the steps of each job; their CPU time only if the job's own CPU time is missing."""
    tasks = pl.col("NTasks").fill_null(1).clip(1)
    per_node = ((tasks - 1) // pl.col("NNodes").fill_null(1).clip(1)) + 1
    largest = pl.when(~_EXTERN).then(pl.col("MaxRSS"))
    used = read_usage(steps["TRESUsageInTot"], "mem").alias("_used")
    summed = steps.select(
        "_group",
        "Start",
        "End",
        "NodeList",
        "NNodes",
        _beside=_BESIDE,
        _rss=largest,
        _cpu=clock_s("TotalCPU") if cpu_missing else pl.lit(None, dtype=pl.Float64),
        tasks=pl.when(~_BESIDE).then("NTasks"),
        mem_used_bytes=pl.when(~_EXTERN).then(pl.coalesce(used, pl.col("AveRSS") * tasks, largest * tasks)),
        # No node held more than all tasks together.
        mem_per_node_bytes=pl.min_horizontal(
            largest * per_node, pl.when(~_EXTERN & (used > 0)).then(pl.max_horizontal(used, "MaxRSS"))
        ),
    )
    result = summed.group_by("_group").agg(
        steps=pl.len(), max_rss_bytes=pl.col("_rss").max(), _step_cpu=pl.col("_cpu").sum()
    )
    peaks = [name for name in _PEAKS if only is None or name in only]
    most = _most_at_once(summed, peaks)
    if "mem_per_node_bytes" in peaks:
        most = _most_on_a_node(summed, jobs, most)
    result = result.join(most, on="_group", how="left")
    if only is None or "gpu_utilization" in only:
        result = result.join(_gpu_use(steps, jobs), on="_group", how="left")
    lacking = [name for name in (*_PEAKS, "gpu_utilization", "gpu_mem_bytes") if name not in result.columns]
    return result.with_columns(pl.lit(None, dtype=pl.Int64).alias(name) for name in lacking) if lacking else result


def _most_at_once(steps: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The largest sum of each column over steps of a job that ran at the same time; null without samples.

    A step without a start counts as parallel to the others. A step that begins in the second of another step's end
    follows it.
    """
    begin = pl.col("Start").fill_null(0).clip(0, _NEVER - 1)
    end = pl.when(pl.col("End") > 0).then(pl.col("End").clip(0, _NEVER - 1)).otherwise(_NEVER)
    moment = pl.col("_group").cast(pl.Int64) * (_NEVER * 2 * 4)
    # Within a second: ends, then starts, then the ends of steps that began in it, which ran after all.
    begins = steps.lazy().select("_group", *columns, _moment=moment + begin * 4 + 1)
    ends = steps.lazy().select(
        "_group",
        *(-pl.col(name) for name in columns),
        _moment=moment + end * 4 + pl.when(end > begin).then(0).otherwise(2),
    )
    # The values of a job sum to 0 at its end, so the sums of the next job start at 0.
    sums = (
        pl.concat([begins, ends])
        .sort("_moment")
        .with_columns(pl.col(name).fill_null(0).cum_sum().alias(f"_{name}") for name in columns)
    )
    most = [pl.when(pl.col(name).count() > 0).then(pl.col(f"_{name}").max()).alias(name) for name in columns]
    return sums.group_by("_group").agg(most).collect()


def _most_on_a_node(steps: pl.DataFrame, jobs: pl.DataFrame, most: pl.DataFrame) -> pl.DataFrame:
    """``most``, with the memory of the fullest node for jobs with a step on only some of their nodes.

    A step without a readable list of nodes counts on each node of its job.
    """
    column = "mem_per_node_bytes"
    nodes = jobs.select("_group", _job_nodes="NNodes", _job_list="NodeList").filter(pl.col("_job_nodes") > 1)
    placed = steps.filter(pl.col(column).is_not_null()).join(nodes, on="_group", how="inner")
    has_part = (~pl.col("_beside") & (pl.col("NNodes") < pl.col("_job_nodes"))).any().over("_group")
    placed = placed.filter(has_part)
    hosts = {text: _hosts(text) for text in {*placed["NodeList"].drop_nulls(), *placed["_job_list"].drop_nulls()}}
    by_list = pl.DataFrame(
        {"_list": list(hosts), "_hosts": list(hosts.values())},
        schema={"_list": pl.String, "_hosts": pl.List(pl.String)},
    )
    placed = placed.join(by_list, left_on="NodeList", right_on="_list", how="left")
    placed = placed.join(by_list, left_on="_job_list", right_on="_list", how="left", suffix="_of_job")
    placed = placed.with_columns(_host=pl.coalesce("_hosts", "_hosts_of_job"))
    placed = placed.filter(pl.col("_host").is_not_null().all().over("_group")).explode("_host")
    if placed.is_empty():
        return most
    placed = placed.with_columns(_job=pl.col("_group"), _group=pl.struct("_group", "_host").rank("dense"))
    on_node = _most_at_once(placed, [column]).join(placed.select("_group", "_job").unique(), on="_group")
    fullest = on_node.group_by("_job").agg(_fullest=pl.col(column).max())
    most = most.join(fullest, left_on="_group", right_on="_job", how="left")
    return most.with_columns(pl.coalesce("_fullest", column).alias(column)).drop("_fullest")


def _hosts(text: str) -> list[str] | None:
    try:
        return hosts_of(text) if text not in NOTHING else None
    except ValueError:
        return None


def _gpu_use(steps: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Mean use of each job's GPUs, 0 to 1, over the steps that count (see the top of this module), and their memory."""
    gathered = steps.filter(pl.any_horizontal(pl.col(_USAGE).str.contains("gres/gpuutil=", literal=True)))
    if gathered.is_empty():
        return gathered.select(
            "_group", gpu_utilization=pl.lit(None, dtype=pl.Float64), gpu_mem_bytes=pl.lit(None, dtype=pl.Int64)
        )
    gathered = gathered.join(
        jobs.select("_group", _job_tres="AllocTRES"), on="_group", how="left", maintain_order="left"
    )
    shares = gathered.select(pl.col(_USAGE).str.extract(r"gres/gpuutil=([\d.]+)").cast(pl.Float64, strict=False))
    total, mean = shares["TRESUsageInTot"], shares["TRESUsageInAve"]
    percent = total.zip_with(total.is_not_null(), mean * gathered["NTasks"].fill_null(1))
    gpus = map_distinct(gathered["AllocTRES"], count_gpus, pl.Float64)
    allocated = gpus.is_not_null().alias("_allocated")
    of_job = map_distinct(gathered["_job_tres"], count_gpus, pl.Float64)
    gpus = gpus.zip_with(gpus.is_not_null(), of_job)
    memory = steps.select(
        "_group", "JobID", "Start", "End", gpu_mem_bytes=read_usage(steps["TRESUsageInTot"], "gres/gpumem")
    )
    used = _most_at_once(memory.filter(~_EXTERN), ["gpu_mem_bytes"])
    gathered = gathered.with_columns(
        _percent=percent, _gpus=gpus.fill_null(1).clip(1), _of_job=of_job, _beside=_BESIDE, _allocated=allocated
    )
    gathered = gathered.filter(pl.col("_percent").is_not_null() & ~_EXTERN)
    gathered = gathered.with_columns(_worked=pl.col("_percent") > 0)
    # A step without GPUs could use none if other steps have GPUs.
    others_have = (pl.col("_allocated") & ~pl.col("_beside")).any().over("_group")
    gathered = gathered.filter(pl.col("_worked") | pl.col("_allocated") | ~others_have)
    first = pl.col("Start").filter("_worked").min().over("_group")
    last = pl.col("End").filter("_worked").max().over("_group")
    apart = ((pl.col("End") <= first) | (pl.col("Start") >= last)).fill_null(False)
    counted = gathered.filter(pl.col("_worked") | first.is_null() | (~pl.col("_beside") & apart))
    weight = pl.col("ElapsedRaw").clip(1) * pl.col("_gpus")
    share = (pl.col("_percent") / pl.col("_gpus")).clip(0, 100) / 100
    utilization = (
        counted.group_by("_group")
        .agg(_used=(share * weight).sum(), _held=weight.sum(), _longest=weight.max())
        .join(_shared_gpu_s(counted), on="_group", how="left")
    )
    had = (pl.col("_held") - pl.col("_shared").fill_null(0)).clip(lower_bound=pl.col("_longest"))
    utilization = utilization.select("_group", gpu_utilization=(pl.col("_used") / had).clip(0, 1))
    return used.join(utilization, on="_group", how="left")


def _shared_gpu_s(steps: pl.DataFrame) -> pl.DataFrame:
    """GPU-seconds that steps of a job had beyond the GPUs of the job, ``_shared``."""
    timed = steps.filter(pl.col("Start").is_not_null() & pl.col("End").is_not_null())
    begins = timed.select("_group", "_of_job", _at="Start", _more="_gpus")
    ends = timed.select("_group", "_of_job", _at="End", _more=-pl.col("_gpus"))
    moments = pl.concat([begins, ends]).sort("_group", "_at").with_columns(
        _had=pl.col("_more").cum_sum().over("_group"),
        _lasted=(pl.col("_at").shift(-1).over("_group") - pl.col("_at")).fill_null(0),
    )  # fmt: skip
    return moments.group_by("_group").agg(
        _shared=((pl.col("_had") - pl.col("_of_job")).clip(0) * pl.col("_lasted")).sum()
    )


def _jobs(jobs: pl.DataFrame, doubts: Doubts, only: Collection[str] | None) -> pl.DataFrame:
    jobs = jobs.with_columns(*_parse_repeating_columns(jobs), _clock=clock_s("TotalCPU"))
    # Exactly 0 means that the accounting did not measure: every process takes some milliseconds.
    cpu = pl.coalesce(pl.when(pl.col(name) > 0).then(name) for name in ("_clock", "_step_cpu"))
    # Of a job that has not ended only the steps that have are accounted for.
    live = pl.col("state").is_in([state.value for state in State if not state.ended and state is not State.REQUEUED])
    live &= pl.col("state") != State.UNKNOWN.value
    live &= ~((pl.col("state") == State.RESIZING.value) & (pl.col("End") > 0).fill_null(False))
    resized = ((pl.col("Start") > 0) & (pl.col("Submit") > pl.col("Start"))).fill_null(False)
    energy = pl.col("ConsumedEnergyRaw")
    waited_until = pl.coalesce("started", "ended")
    columns: dict[str, pl.Expr | str] = {
        "job_id": "JobID",
        "job_id_raw": pl.coalesce("JobIDRaw", "JobID"),
        "name": "JobName",
        "user": known_text("User"),
        "account": known_text("Account"),
        "partition": known_text("Partition"),
        "qos": known_text("QOS"),
        "state": "state",
        "_word": "State",
        "reason": known_text("Reason"),
        "exit_code": pl.when(~pl.col("state").is_in(["PENDING", "RUNNING", "SUSPENDED", "REQUEUED"])).then("_code"),
        "signal": pl.when(pl.col("_signal") > 0).then("_signal"),
        "submitted": pl.when(pl.col("Submit") > 0).then("Submit"),
        "eligible": pl.when(pl.col("Eligible") > 0).then("Eligible"),
        "started": pl.when(resized).then("Submit").when(pl.col("Start") > 0).then("Start"),
        "ended": pl.when(pl.col("End") > 0).then("End"),
        "elapsed_s": pl.when(resized)
        .then((pl.col("ElapsedRaw") - (pl.col("Submit") - pl.col("Start"))).clip(0))
        .otherwise("ElapsedRaw"),
        "time_limit_s": pl.col("TimelimitRaw") * 60,
        "nodes": "NNodes",
        "tasks": pl.coalesce("tasks", pl.when(pl.col("steps") > 0).then(1)),
        "cpus": "NCPUS",
        "gpus": pl.col("_gpus").fill_null(0),
        "node_list": known_text("NodeList"),
        "cluster": known_text("Cluster"),
        "mem_requested_bytes": "_mem",
        "mem_used_bytes": pl.when(~live).then("mem_used_bytes"),
        "mem_per_node_bytes": pl.when(~live).then("mem_per_node_bytes"),
        "max_rss_bytes": pl.when(~live).then(pl.coalesce("max_rss_bytes", "MaxRSS")),
        "cpu_s": pl.when(~live).then(cpu),
        "gpu_utilization": pl.when(~live).then("gpu_utilization"),
        "gpu_mem_bytes": "gpu_mem_bytes",
        "_counted_j": pl.when((energy > 0) & (energy < _LARGEST_J)).then(energy),
        "_ended_steps_cpu_s": pl.when(live).then(cpu.fill_null(0.0)),
        "_ended_steps_mem_bytes": pl.when(live).then("mem_used_bytes"),
        "_ended_steps_rss_bytes": pl.when(live).then("max_rss_bytes"),
        "steps": pl.col("steps").fill_null(0).cast(pl.Int64),
    }  # fmt: skip
    chosen = {name: column for name, column in columns.items() if only is None or name in only or name in _OF_ALL}
    frame = jobs.select(**chosen, _resized=resized)
    waits = ~pl.col("_resized")
    frame = frame.with_columns(
        queue_wait_s=pl.when(waits).then((waited_until - pl.col("eligible")).clip(0)),
        held_s=pl.when(waits).then((pl.col("eligible") - pl.col("submitted")).clip(0)),
    ).drop("_resized")
    return _blank_impossible_times(frame, doubts)


def _parse_repeating_columns(jobs: pl.DataFrame) -> list[pl.Series]:
    """Parse the columns with few different values once per value: state, exit code, signal, GPUs, memory."""
    held = jobs.select(pl.coalesce("AllocTRES", "ReqTRES"))["AllocTRES"]
    memory = map_distinct(held, lambda value: read_bytes(read_resource(value, "mem")), pl.Int64)
    if memory.has_nulls():
        memory = memory.zip_with(memory.is_not_null(), _requested_memory(jobs))
    return [
        map_distinct(jobs["State"], lambda value: State.parse(value).value, pl.String)
        .fill_null("UNKNOWN")
        .alias("state"),
        map_distinct(jobs["ExitCode"], lambda value: read_exit(value)[0], pl.Int64).alias("_code"),
        map_distinct(jobs["ExitCode"], lambda value: read_exit(value)[1], pl.Int64).alias("_signal"),
        map_distinct(held, count_gpus, pl.Int64).alias("_gpus"),
        memory.alias("_mem"),
    ]


def _requested_memory(jobs: pl.DataFrame) -> pl.Series:
    """ReqMem of all nodes: per CPU (``4000Mc``) or node (``4Gn``) before Slurm 21.08, the job's total later."""
    each = map_distinct(jobs["ReqMem"], lambda value: read_bytes(value.rstrip("cn")), pl.Int64)
    per_cpu, per_node = (jobs["ReqMem"].str.ends_with(unit).fill_null(False) for unit in ("c", "n"))
    parts = pl.select(pl.when(per_cpu).then(jobs["NCPUS"]).when(per_node).then(jobs["NNodes"]).otherwise(1)).to_series()
    return each * parts


def _blank_impossible_times(frame: pl.DataFrame, doubts: Doubts) -> pl.DataFrame:
    """Count impossible values: unknown states, ends before starts. Such times become null."""
    odd = frame.filter(pl.col("state") == "UNKNOWN")
    doubts.add("unknown state", (f"{job}: {state!r}" for job, state in odd.select("job_id", "_word").rows()))
    backwards = (pl.col("ended") < pl.col("started")).fill_null(False)
    doubts.add("ends before it starts", frame.filter(backwards)["job_id"].to_list())
    blank = pl.lit(None, dtype=pl.Int64)
    return frame.drop("_word").with_columns(
        pl.when(backwards).then(blank).otherwise(pl.col(name)).alias(name) for name in ("started", "ended", "elapsed_s")
    )
