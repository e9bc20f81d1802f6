"""Does the job fit the site? Asked before Slurm is, so that the answer is immediate and complete."""

from __future__ import annotations

from collections.abc import Iterator

from hpcjobs.errors import RequestError
from hpcjobs.job.array import check_array
from hpcjobs.job.models import Job
from hpcjobs.site.models import Partition, Site
from hpcjobs.units import memory_bytes, walltime_s


def check_limits(job: Job, site: Site, partition: Partition | None) -> None:
    """Compare ``job`` with its partition and QOS.

    Raises:
        RequestError: one line per limit exceeded, each with what was asked, where that was said,
            what is allowed, and the file that says so.
    """
    problems = [*_request_problems(job), *_qos_problems(job, site, partition)]
    if partition is not None:
        problems += _partition_problems(job, partition)
    if problems:
        where = f"site {site.name} ({site.path})"
        raise RequestError(f"the job does not fit {where}:\n" + "\n".join(f"  {p}" for p in problems))


def _asked(job: Job, field: str) -> str:
    return job.asked(field)


def _request_problems(job: Job) -> Iterator[str]:
    if job.scheduler == "local":
        yield from _host_problems(job)
    if job.signal_before_s and job.resources.time and job.signal_before_s >= walltime_s(job.resources.time):
        source = job.sources.get("signal_before", "site")
        yield f"signal_before={job.signal_before_s} s ({source}): no shorter than {_asked(job, 'time')}"
    if job.retries is not None and job.launcher == "horovodrun":
        said = f"retries={job.retries} ({job.sources.get('retries', 'site')})"
        yield f"{said}: launcher horovodrun cannot tell its ranks to save; horovod-gloo and mpirun can"
    if job.resources.array:
        try:
            check_array(job.resources.array)
        except ValueError as error:
            yield f"{_asked(job, 'array')}: {error}"
    if len([m for m in (job.resources.mem, job.resources.mem_per_cpu, job.resources.mem_per_gpu) if m]) > 1:
        yield "mem, mem_per_cpu and mem_per_gpu exclude each other; null clears one set by the site"
    if job.resources.clusters:
        yield (
            f"{_asked(job, 'clusters')}: ps, wait and cancel would ask another cluster about the job;"
            " give that cluster a site with its slurm_conf, or set SLURM_CLUSTERS for every command"
        )
    if job.gpu_request == "none" and job.resources.gpus_per_node:
        yield f"{_asked(job, 'gpus_per_node')}: this site takes no GPU request (gpu_request: none)"


def _host_problems(job: Job) -> Iterator[str]:
    """Without a scheduler there is this machine, and the hosts named, which mpirun and horovodrun reach by ssh."""
    if job.nodes > max(1, len(job.hosts)):
        named = f"names {len(job.hosts)} hosts" if job.hosts else "is one machine; nodelist can name more hosts"
        yield f"{_asked(job, 'nodes')}: this site {named}"
    if job.hosts and job.launcher not in ("mpirun", "horovodrun"):
        yield f"{_asked(job, 'nodelist')}: launcher {job.launcher} starts tasks on this machine only; say mpirun"


def _partition_problems(job: Job, partition: Partition) -> Iterator[str]:
    asked, node = job.resources, partition.node
    name = asked.partition or "of this site"
    most = min(partition.max_nodes or partition.nodes, partition.nodes)
    if job.nodes + job.spare > most:
        yield f"{_asked(job, 'nodes')}: partition {name} allows {most}"
    if asked.time and partition.max_time and walltime_s(asked.time) > walltime_s(partition.max_time):
        yield f"{_asked(job, 'time')}: partition {name} allows {partition.max_time}"
    if asked.gpus_per_node and asked.gpus_per_node > node.gpus:
        yield f"{_asked(job, 'gpus_per_node')}: a node of partition {name} has {node.gpus}"
    if asked.mem and node.mem and memory_bytes(asked.mem) > memory_bytes(node.mem):
        yield f"{_asked(job, 'mem')}: a node of partition {name} has {node.mem}"
    cpus = job.ntasks_per_node * (asked.cpus_per_task or 1)
    if asked.mem_per_cpu and node.mem and memory_bytes(asked.mem_per_cpu) * cpus > memory_bytes(node.mem):
        yield f"{_asked(job, 'mem_per_cpu')} x {cpus} CPUs: a node of partition {name} has {node.mem}"
    if cpus > node.cpus:
        yield (
            f"{_asked(job, 'ntasks_per_node')} x cpus_per_task={asked.cpus_per_task or 1} = {cpus} CPUs:"
            f" a node of partition {name} has {node.cpus}"
        )


def _qos_problems(job: Job, site: Site, partition: Partition | None) -> Iterator[str]:
    qos = job.resources.qos
    if not qos:
        return
    if site.qos and qos not in site.qos:
        yield f"{_asked(job, 'qos')}: known: {', '.join(sorted(site.qos))}"
        return
    if partition is not None and partition.qos is not None and qos not in partition.qos:
        yield f"{_asked(job, 'qos')}: partition {job.resources.partition} accepts {', '.join(partition.qos)}"
    limit = site.qos.get(qos)
    if limit and job.resources.time and walltime_s(job.resources.time) > walltime_s(limit):
        yield f"{_asked(job, 'time')}: qos {qos} allows {limit}"
