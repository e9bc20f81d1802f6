"""Checks whether a job fits the site before Slurm is asked, so the answer is immediate and complete."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.array import check_array
from hpcjobs.job.fit import partition_problems
from hpcjobs.job.models import Job
from hpcjobs.site.models import Partition, Site
from hpcjobs.units import time_limit_s


def check_limits(job: Job, site: Site, partitions: Mapping[str, Partition]) -> None:
    """Compare ``job`` with ``partitions``, of which one is enough, and with its QOS.

    Raises:
        RequestError: one line per limit exceeded, each with the option, where it was read,
            what is allowed, and the file that says so.
    """
    problems = [*_request_problems(job), *_license_problems(job, site)]
    if job.scheduler == "slurm":
        problems += _missing(job, site.required, f"site {site.name}")
    unfit = [_problems_in(job, site, name, partition) for name, partition in partitions.items()]
    if not unfit:
        problems += _qos_problems(job, site, None, None)
    elif all(unfit):
        problems += dict.fromkeys(line for lines in unfit for line in lines)
    if problems:
        where = f"site {site.name} ({site.path})"
        raise RequestError(
            f"the job does not fit {where}:\n" + "\n".join(f"  {p}" for p in problems),
            hint=_where_it_fits(job, site, partitions) if unfit and all(unfit) else None,
        )


def _problems_in(job: Job, site: Site, name: str, partition: Partition) -> list[str]:
    return [
        *_qos_problems(job, site, name, partition),
        *_missing(job, partition.required, f"partition {name}"),
        *partition_problems(job, name, partition),
    ]


def _where_it_fits(job: Job, site: Site, partitions: Mapping[str, Partition]) -> str | None:
    """The options that take the job as it is: other partitions, or a QOS for so long a job."""
    others = {name: partition for name, partition in site.partitions.items() if name not in partitions}
    fitting = [name for name, partition in others.items() if not _problems_in(job, site, name, partition)]
    if fitting:
        return f"takes it: {', '.join(f'-p {name}' for name in fitting)}"
    for qos in site.qos:
        changed = replace(job, resources=replace(job.resources, qos=qos))
        if any(not _problems_in(changed, site, name, partition) for name, partition in partitions.items()):
            return f"takes it: --qos {qos}"
    return None


def _request_problems(job: Job) -> Iterator[str]:
    if job.scheduler == "local":
        yield from _host_problems(job)
    limit_s = job.time_limit_s
    if job.signal_before_s and limit_s is not None and job.signal_before_s >= limit_s:
        source = job.sources.get("signal_before", "site")
        yield f"signal_before={job.signal_before_s} s ({source}): no shorter than {job.describe_option('time')}"
    if job.retries is not None and job.launcher == "horovodrun":
        option = f"retries={job.retries} ({job.sources.get('retries', 'site')})"
        yield f"{option}: launcher horovodrun cannot tell its ranks to save; horovod-gloo and mpirun can"
    if job.resources.array:
        try:
            check_array(job.resources.array)
        except ValueError as error:
            yield f"{job.describe_option('array')}: {error}"
    if len([m for m in (job.resources.mem, job.resources.mem_per_cpu, job.resources.mem_per_gpu) if m]) > 1:
        yield "mem, mem_per_cpu and mem_per_gpu exclude each other; null clears one set by the site"
    if job.resources.clusters:
        yield (
            f"{job.describe_option('clusters')}: ps, wait and cancel would ask another cluster about the job;"
            " give that cluster a site with its slurm_conf, or set SLURM_CLUSTERS for every command"
        )
    if job.spare and job.max_nodes is not None:
        yield f"{job.describe_option('nodes')}: spare={job.spare} is chosen from a number of nodes, not from a range"
    if job.gpu_request == "none" and job.gpus_per_node:
        yield f"{job.describe_option('gpus_per_node')}: this site takes no GPU request (gpu_request: none)"


def _missing(job: Job, required: Sequence[str], where: str) -> Iterator[str]:
    for field in required:
        if getattr(job.resources, field) is None:
            option = field.replace("_", "-")
            yield f"{field}: {where} needs one: use --{option}, or name it in defaults of the site file"


def _license_problems(job: Job, site: Site) -> Iterator[str]:
    """Licences as ``a:2,b`` or ``a:2|b`` asks for them; each of several alternatives must exist."""
    if not site.licenses or not job.resources.licenses or job.scheduler == "local":
        return
    for part in re.split(r"[,;|]", job.resources.licenses):
        name, count = re.fullmatch(r"(.*?)(?:[:*](\d+))?", part.strip(), re.S).groups()  # type: ignore[union-attr]
        if name not in site.licenses:
            yield f"{job.describe_option('licenses')}: no licence {name!r}; {nearest(name, site.licenses)}"
        elif int(count or 1) > site.licenses[name]:
            yield f"{job.describe_option('licenses')}: there are {site.licenses[name]} of {name}"


def _host_problems(job: Job) -> Iterator[str]:
    """Without a scheduler there is this machine, and the hosts named, which mpirun and horovodrun reach by ssh."""
    if job.nodes > max(1, len(job.hosts)):
        named = f"names {len(job.hosts)} hosts" if job.hosts else "is one machine; nodelist can name more hosts"
        yield f"{job.describe_option('nodes')}: this site {named}"
    if job.hosts and job.launcher not in ("mpirun", "horovodrun"):
        nodelist = job.describe_option("nodelist")
        yield f"{nodelist}: launcher {job.launcher} starts tasks on this machine only; use mpirun"


def _qos_problems(job: Job, site: Site, name: str | None, partition: Partition | None) -> Iterator[str]:
    """The QOS that is named, or that the job gets without: accepted by the partition, and for so long a job."""
    qos = job.resources.qos or site.default_qos
    if not qos:
        return
    source = job.describe_option("qos") if job.resources.qos else f"qos: none is named, and the default is {qos}"
    if site.qos and qos not in site.known_qos:
        yield f"{source}: known: {', '.join(sorted(site.known_qos))}"
        return
    if partition is not None and partition.qos is not None and qos not in partition.qos:
        yield f"{source}: partition {name} accepts {', '.join(partition.qos)}"
        return
    longest, requested_s = time_limit_s(site.qos.get(qos) or None), job.time_limit_s
    if job.resources.time and longest is not None and (requested_s is None or requested_s > longest):
        yield f"{job.describe_option('time')}: qos {qos} allows {site.qos[qos]}"
