"""Tasks of one Horovod world that meet by Gloo, with no MPI."""

from __future__ import annotations

import shlex

from hpcjobs.job.launch.base import Launch, Raw, command_line, entering, task
from hpcjobs.job.launch.slurm import one_task_per_rank
from hpcjobs.job.launch.torch import children
from hpcjobs.job.models import Job
from hpcjobs.processes.modules import LEAVE_FOLDER, module_words

_SERVER = f"""\
{LEAVE_FOLDER}
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
hosts = parse_hosts(sys.argv[1])
server = RendezvousHTTPServer(("", 0), RendezvousHandler, False)
server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
print(server.server_port, flush=True)
server.serve_forever()"""


def horovod_gloo(job: Job) -> Launch:
    """Plain ``srun`` (or, on one machine, ``spawn``): the script keeps the addresses until all ranks have them."""
    command = children(job) if job.scheduler == "local" else one_task_per_rank(job)
    return Launch(command=command, before=_rendezvous(job))


def _rendezvous(job: Job) -> tuple[str, ...]:
    """Start Horovod's own server, which says its port once it listens, and publish where it is."""
    per_node = job.ntasks_per_node
    names = "echo localhost" if job.scheduler == "local" else 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    interface = f" HOROVOD_GLOO_IFACE={shlex.quote(job.interface)}" if job.interface else ""
    # The node of this script need not be one of those that the job runs on, where there were spare ones.
    here = f"$SLURMD_NODENAME{job.address_suffix}" if job.spare else "$MASTER_ADDR"
    server = (*entering(job), job.python, "-", Raw('"$_hj_hosts"'))
    return (
        "# Horovod's ranks find each other through this server: neither MPI nor ssh is needed.",
        f"_hj_hosts=$({names} | sed 's/$/:{per_node}/' | paste -sd,)",
        f"""exec {{_hj_port}}< <(exec {command_line(server)} <<'PY'""",
        *_SERVER.splitlines(),
        "PY",
        ")",
        '_hj_helpers+=("$!")',
        'read -r -u "$_hj_port" HOROVOD_GLOO_RENDEZVOUS_PORT ||',
        f"    die {shlex.quote(f'no Horovod rendezvous: is Horovod in the environment of {job.python}?')}",
        f"export HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_GLOO_RENDEZVOUS_ADDR={here}",
        f"export HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo{interface}",
        f"export HOROVOD_SIZE=$HPCJOBS_NTASKS HOROVOD_LOCAL_SIZE={per_node} HOROVOD_CROSS_SIZE=$HPCJOBS_NNODES",
    )


def horovodrun(job: Job) -> Launch:
    """Horovod's own launcher: on this machine directly, on other nodes by ssh.

    Of one node it wants the loopback interface, and finds none where another one is named.
    """
    interface = ("--network-interfaces", job.interface) if job.interface and job.nodes > 1 else ()
    hosts: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    if job.scheduler == "slurm":
        suffix = f"sed 's/$/:{job.ntasks_per_node}/' | paste -sd,"
        before = (f'_hj_hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | {suffix})',)
        hosts = ("-H", Raw('"$_hj_hosts"'))
    elif job.hosts:
        hosts = ("-H", ",".join(f"{host}:{job.ntasks_per_node}" for host in job.hosts))
    launcher = (job.python, *module_words("horovod.runner.launch"))
    tokens = (*launcher, "--gloo", "-np", Raw('"$HPCJOBS_NTASKS"'), *hosts, *interface)
    plain = r'exec "$@" > >(exec sed -u -E "s/^\[([0-9]+)\]<std(out|err)>:/\1: /") 2>&1'
    return Launch(command=("bash", "-c", plain, "horovodrun", *tokens, *task(job), *job.argv), before=before)
