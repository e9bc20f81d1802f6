"""Rules about ranks that talk to each other: launchers, rendezvous, NCCL, Gloo, MPI."""

from __future__ import annotations

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.rules.rule import Rule, rule
from hpcjobs.diagnosis.values import Kind

_CHECK_NODES = "hpcjobs fabric --site {site}  # measures the network between nodes"

DISTRIBUTED: tuple[Rule, ...] = (
    rule(
        "mpi-not-started-by-slurm",
        r"^.*not built with SLURM's PMI support|PMI2?_Init failed|PMIX?_Init.*(?:fail|error)"
        r"|Invalid MPI plugin name|MPI type \S+ is not|no PMIx server was reachable",
        "srun and this MPI library do not speak the same PMI",
        "srun --mpi=list ; hpcjobs sites show {site}  # `mpi` of the site file names one of them",
    ),
    rule(
        "world-size",
        r"this task sees a world of (?P<seen>\S+) and not of (?P<expected>\d+)"
        r"|WORLD_SIZE is (?P<seen2>\S+), expected (?P<expected2>\d+)",
        "A rank saw a world of {seen} instead of {expected} ranks: the launcher did not start one world",
        "srun --mpi=list ; hpcjobs sites show {site}  # `mpi` of the site file must fit the MPI library",
    ),
    rule(
        "no-slots",
        r"There are not enough slots available|There are no allocated resources",
        "mpirun was to start more ranks than the allocation has tasks",
        "{again} --ntasks-per-node N  # or mpirun without -np",
    ),
    rule(
        "mpi-abort",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+)|application called MPI_Abort\(.*\) - process (?P<rank2>\d+)",
        "The program called MPI_Abort",
        "hpcjobs logs {job} --rank {rank}  # what it printed before",
        kind=Kind.ERROR,
    ),
    rule(
        "mpi-error",
        r"Abort\(\d+\) (?:on node \d+ )?\(rank (?P<rank>\d+) in comm \d+\): (?P<error>Fatal error in .*?)"
        r"(?:, error stack:?)?$",
        "An MPI call failed: {error}",
        kind=Kind.ERROR,
        certain=False,
    ),
    rule(
        "mpi-error",
        r"\*\*\* (?P<error>MPI_ERR_\w+): (?P<message>.*)|(?P<error2>MPI_ERR_\w+): ",
        "An MPI call failed: {error}",
        kind=Kind.ERROR,
    ),
    rule(
        "network-unreachable",
        r"(?i)(?:NCCL|UCX|gloo|socket|connect|orte|process or daemon).*(?:no route to host|network is unreachable"
        r"|destination is unreachable|unable to complete a TCP connection)|Failed to resolve UCX endpoint"
        r"|A process or daemon was unable to complete a TCP connection",
        "Ranks could not reach each other over the network interface they chose",
        "{again} --env NCCL_SOCKET_IFNAME=INTERFACE --env GLOO_SOCKET_IFNAME=INTERFACE  # ip -br addr lists them",
        _CHECK_NODES,
        certain=False,
    ),
    rule(
        "collective-timeout",
        r"Watchdog caught collective operation timeout.*OpType=(?P<operation>\w+)"
        r"|Watchdog caught collective operation timeout"
        r"|collective operation timeout|(?i:timed out waiting \d+ms for (?:recv|send) operation)"
        r"|Timed out waiting \d+ms",
        "A collective operation did not end in time: a rank stood still, was lost, or called another operation",
        "{again} --env TORCH_NCCL_TRACE_BUFFER_SIZE=2000 --env TORCH_DISTRIBUTED_DEBUG=DETAIL",
        certain=False,
    ),
    rule(
        "nccl-error",
        r"NCCL WARN (?P<message>.+)|NCCL error in: \S+, (?!remote process)(?P<message2>.+)"
        r"|(?P<message3>nccl(?:(?:System|Internal|UnhandledCuda)Error|InvalidUsage|InvalidArgument)\b.*)"
        r"|unhandled (?:system|cuda) error",
        "NCCL failed: {message}",
        "{again} --env NCCL_DEBUG=INFO",
        kind=Kind.ERROR,
    ),
    rule(
        "rendezvous-timeout",
        r"(?i)timed out (?:after \d+ seconds )?waiting for clients|wait timeout after \d+ms|RendezvousTimeoutError"
        r"|RendezvousConnectionError|client socket has timed out|socket Timeout|DistStoreError.*[Tt]imed out"
        r"|Horovod.*timed out|TimeoutException: Horovod|the ranks did not find each other",
        "Not all ranks came to the rendezvous in time: one did not start, or cannot reach the first host",
        _CHECK_NODES,
    ),
    rule(
        "torchrun-child-failed",
        r"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError|ChildFailedError",
        "torchrun reports that a rank failed",
        kind=Kind.CONSEQUENCE,
    ),
    rule(
        "peer-lost",
        rf"(?i)(?:{gpu_errors.LOST.pattern})|socket closed|recvValue"
        r"|remote process has (?:exited|terminated)|Connection refused|has been shut ?down"
        r"|lost connection"
        r"|process group.*(?:aborted|destroyed)|RPC failed|collective.*has been aborted|HorovodInternalError"
        r"|connect\w* .*failed|another (?:rank|process) (?:went|was)",
        "A rank lost another one, which had failed before",
        kind=Kind.CONSEQUENCE,
    ),
    rule(
        "ended-with-the-job",
        r"(?:srun|slurmstepd): (?:error: )?(?:\*\*\* (?:STEP|JOB)|Terminating|Job step aborted)"
        r"|received? signal (?:15|SIGTERM)|closing signal SIGTERM|SignalException"
        r"|srun: error: Unable to create step for job \d+: Job/step already completing",
        "The rest of the job was ended",
        kind=Kind.CONSEQUENCE,
    ),
    rule(
        "interrupted",
        r"^(?:Program )?(?:KeyboardInterrupt|InterruptException)\b|^srun: (?:interrupt|forcing job termination)",
        "The program was interrupted: somebody pressed Ctrl-C, or sent SIGINT by scancel --signal=INT",
        kind=Kind.ERROR,
        certain=False,
    ),
)
