"""Does the job fit the site? Asked before Slurm is, so that the answer is immediate and complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcjobs.errors import RequestError
from hpcjobs.job.array import check_array
from hpcjobs.job.fit import partition_problems
from hpcjobs.job.models import Job
from hpcjobs.site.models import Partition, Site
from hpcjobs.units import time_limit_s


def check_limits(job: Job, site: Site, partitions: Mapping[str, Partition]) -> None:
    """Compare ``job`` with ``partitions``, of which one is enough, and with its QOS.

    Raises:
        RequestError: one line per limit exceeded, each with what was asked, where that was said,
            what is allowed, and the file that says so.
    """
    problems = list(_request_problems(job))
    unfit = [
        [*_qos_problems(job, site, name, partition), *partition_problems(job, name, partition)]
        for name, partition in partitions.items()
    ]
    if not unfit:
        problems += _qos_problems(job, site, None, None)
    elif all(unfit):
        problems += dict.fromkeys(line for lines in unfit for line in lines)
    if problems:
        where = f"site {site.name} ({site.path})"
        raise RequestError(f"the job does not fit {where}:\n" + "\n".join(f"  {p}" for p in problems))


def _request_problems(job: Job) -> Iterator[str]:
    if job.scheduler == "local":
        yield from _host_problems(job)
    limit_s = job.time_limit_s
    if job.signal_before_s and limit_s is not None and job.signal_before_s >= limit_s:
        source = job.sources.get("signal_before", "site")
        yield f"signal_before={job.signal_before_s} s ({source}): no shorter than {job.asked('time')}"
    if job.retries is not None and job.launcher == "horovodrun":
        said = f"retries={job.retries} ({job.sources.get('retries', 'site')})"
        yield f"{said}: launcher horovodrun cannot tell its ranks to save; horovod-gloo and mpirun can"
    if job.resources.array:
        try:
            check_array(job.resources.array)
        except ValueError as error:
            yield f"{job.asked('array')}: {error}"
    if len([m for m in (job.resources.mem, job.resources.mem_per_cpu, job.resources.mem_per_gpu) if m]) > 1:
        yield "mem, mem_per_cpu and mem_per_gpu exclude each other; null clears one set by the site"
    if job.resources.clusters:
        yield (
            f"{job.asked('clusters')}: ps, wait and cancel would ask another cluster about the job;"
            " give that cluster a site with its slurm_conf, or set SLURM_CLUSTERS for every command"
        )
    if job.spare and job.max_nodes is not None:
        yield f"{job.asked('nodes')}: spare={job.spare} is chosen from a number of nodes, not from a range"
    if job.gpu_request == "none" and job.gpus_per_node:
        yield f"{job.asked('gpus_per_node')}: this site takes no GPU request (gpu_request: none)"


def _host_problems(job: Job) -> Iterator[str]:
    """Without a scheduler there is this machine, and the hosts named, which mpirun and horovodrun reach by ssh."""
    if job.nodes > max(1, len(job.hosts)):
        named = f"names {len(job.hosts)} hosts" if job.hosts else "is one machine; nodelist can name more hosts"
        yield f"{job.asked('nodes')}: this site {named}"
    if job.hosts and job.launcher not in ("mpirun", "horovodrun"):
        yield f"{job.asked('nodelist')}: launcher {job.launcher} starts tasks on this machine only; say mpirun"


def _qos_problems(job: Job, site: Site, name: str | None, partition: Partition | None) -> Iterator[str]:
    """The QOS that is named, or that the job gets without: accepted by the partition, and for so long a job."""
    qos = job.resources.qos or site.default_qos
    if not qos:
        return
    source = job.asked("qos") if job.resources.qos else f"qos: none is named, and the default is {qos}"
    if site.qos and qos not in site.known_qos:
        yield f"{source}: known: {', '.join(sorted(site.known_qos))}"
        return
    if partition is not None and partition.qos is not None and qos not in partition.qos:
        yield f"{source}: partition {name} accepts {', '.join(partition.qos)}"
        return
    longest, asked = time_limit_s(site.qos.get(qos) or None), job.time_limit_s
    if job.resources.time and longest is not None and (asked is None or asked > longest):
        yield f"{job.asked('time')}: qos {qos} allows {site.qos[qos]}"
