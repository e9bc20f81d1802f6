"""Finds what would start sooner: a waiting job in other partitions, with shorter time limits, on fewer nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import msgspec

from hpcjobs.diagnosis.cost import Cost
from hpcjobs.diagnosis.placement import Placement, place
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.job.models import Job, JobSpec
from hpcjobs.job.policy import with_policies
from hpcjobs.processes.programs import Runner, run
from hpcjobs.run.index import Entry
from hpcjobs.run.rerun import read_manifest, resolve_again
from hpcjobs.run.select import is_own
from hpcjobs.scheduler.slurm.fields import read_clock_s, read_count
from hpcjobs.scheduler.slurm.start_estimate import ask_sbatch
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Resources
from hpcjobs.units import slurm_time

SOONER_S = 60.0
"""A start that is less than this sooner is not suggested; of starts that lie closer together, the cheaper is better."""
_LARGEST_SEARCH = 24
"""The most alternatives that are tried: each is a question to the controller."""
_SHARES = (1.0, 0.5, 0.25)
"""Of the time limit."""
_SHORTEST_S = 60
# Fields of `scontrol show job` that a job with the same request needs again.
_SAME = {
    "Account": "account", "QOS": "qos", "Features": "constraint", "TresPerNode": "gres", "CPUs/Task": "cpus-per-task",
    "MinMemoryNode": "mem", "MinMemoryCPU": "mem-per-cpu", "Reservation": "reservation", "Licenses": "licenses",
}  # fmt: skip


def find_sooner(entry: Entry, start_estimate: float | None, *, runner: Runner = run) -> list[Placement]:
    """Alternatives for a job of hpcjobs that start sooner than it would, by start and cost.

    ``start_estimate`` is Slurm's, of the waiting job itself; a new job like it would stand behind it.
    """
    if not is_own(entry):
        return []  # its site file, Python and containers are somebody else's
    try:
        job = read_manifest(Path(entry.run_dir)).job
        site = load_site(job.site_file)
    except HpcJobsError:
        return []  # without its manifest nothing is known of the request
    unchanged = place(job, site, runner=runner)
    if unchanged.start is None:
        return []
    rows = []
    for changes in list(_alternatives(job, list(site.partitions)))[:_LARGEST_SEARCH]:
        try:
            other = with_policies(resolve_again(job, entry, changes))
        except RequestError:
            continue  # it does not fit that partition
        rows.append(place(other, site, runner=runner))
    return _sooner(rows, min(unchanged.start, start_estimate or unchanged.start))


def find_sooner_foreign(
    shown: Mapping[str, str], start_estimate: float | None, *, slurm_conf: str | None = None, runner: Runner = run
) -> list[Placement]:
    """The same for a job that was submitted by other means, from what `scontrol show job` prints of it."""
    nodes, limit_s = read_count(shown.get("NumNodes", "").partition("-")[0]), read_clock_s(shown.get("TimeLimit"))
    own, tasks = shown.get("Partition"), read_count(shown.get("NumTasks", ""))
    if nodes is None or limit_s is None or not own:
        return []
    same = [f"--{option}={shown[field]}" for field, option in _SAME.items() if _is_given(shown.get(field))]

    def ask(partition: str, count: int, seconds: int) -> Placement:
        share = [] if tasks is None else [f"--ntasks={max(count, tasks * count // nodes)}"]
        options = [*same, *share, f"--partition={partition}", f"--nodes={count}", f"--time={slurm_time(seconds)}"]
        estimate = ask_sbatch([*options, "--wrap=true"], slurm_conf=slurm_conf, runner=runner)
        cost = Cost(count * seconds / 3600)
        return Placement("-", partition, estimate.refusal is None, count, slurm_time(seconds), estimate.start, cost)

    unchanged = ask(own, nodes, int(limit_s))
    if unchanged.start is None:
        return []
    env = {"SLURM_CONF": slurm_conf} if slurm_conf else None
    answer = runner(["sinfo", "--noheader", "--format=%R"], env=env)
    partitions = [own, *(name for name in dict.fromkeys(answer.out.split()) if name != own)]
    sizes = [nodes, nodes // 2] if nodes > 1 else [nodes]
    choices = list(product(sizes, _SHARES, partitions))[1 : _LARGEST_SEARCH + 1]  # the first one is the job as it is
    rows = [ask(name, count, max(_SHORTEST_S, int(limit_s * share))) for count, share, name in choices]
    return _sooner(rows, min(unchanged.start, start_estimate or unchanged.start))


def _is_given(value: str | None) -> bool:
    return value not in (None, "", "(null)", "N/A", "0")


def _sooner(rows: list[Placement], start: float) -> list[Placement]:
    best = [(row.start, row) for row in rows if row.start is not None and row.start < start - SOONER_S]
    first = min((when for when, _ in best), default=start)

    def rank(choice: tuple[float, Placement]) -> tuple[float, float]:
        when, row = choice
        return ((when - first) // SOONER_S, row.cost.node_hours if row.cost else 0.0)

    return [row for _, row in sorted(best, key=rank)]


def _alternatives(job: Job, partitions: list[str]) -> Iterator[JobSpec]:
    """Each partition, with shares of the time limit and half the nodes; what changes least comes first."""
    own = job.resources.partition or None
    names = [own, *(name for name in partitions if name != own)]
    sizes = [job.nodes, job.nodes // 2] if job.nodes > 1 and job.max_nodes is None else [job.nodes]
    for size, share, partition in product(sizes, _SHARES, names):
        stated: dict[str, object] = {}
        if partition != own:
            stated["partition"] = partition
        if share != 1.0 and job.time_limit_s is not None:
            stated["time"] = slurm_time(max(_SHORTEST_S, int(job.time_limit_s * share)))
        if size != job.nodes:
            stated["nodes"] = size
        if stated:
            yield JobSpec(resources=msgspec.convert(stated, Resources))
