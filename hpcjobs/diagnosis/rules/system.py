"""The type of a rule about a line of a log, and the rules about the node.

Its files, memory, network and GPUs, and programs that do not start.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.values import Kind

PROGRAM_ERROR = "program-error"
"""The cause for an error message of the program itself, for example of the bundled trainers."""


class Rule(NamedTuple):
    """A pattern of one line of a log, its cause, and the fixes.

    Named groups of the pattern fill placeholders of ``text`` and ``fix``; values of the job fill ``fix``.
    """

    cause: str
    pattern: re.Pattern[str]
    text: str
    fix: tuple[str, ...] = ()
    kind: Kind = Kind.CAUSE
    certain: bool = True
    more_precise_than: tuple[str, ...] = ()
    """Causes that this one explains: the same rank reports them too, on its way to this error."""


def rule(
    cause: str,
    pattern: str,
    text: str,
    *fix: str,
    kind: Kind = Kind.CAUSE,
    certain: bool = True,
    more_precise_than: tuple[str, ...] = (),
) -> Rule:
    """Make a rule from the text of a pattern; small and capital letters differ."""
    return Rule(cause, re.compile(pattern), text, fix, kind, certain, more_precise_than)


_MORE_MEMORY = "{again} --mem {more_memory}"
_MISSING = ("python-module-missing", "python-import-failed", "command-missing", "shared-library-missing")
"""Consequences of a job without its software."""
OF_RANKS = (
    r"(?i:NCCL|gloo|c10d|TCPStore|socket\.cpp|\bUCX|\borte|\bprte|\bPMI|\bMPI|horovod|remote=\[|rendezvous|rdzv"
    r"|torch\.distributed)"
)
"""Names in lines about the communication between ranks; other lines are about a service."""
_SERVICE = rf"^(?!.*{OF_RANKS})"
_ADDRESS = r"(?:host='(?P<host_name>[^']+)', port=|(?:connecting to|server at|connect to) \"?(?P<host_name2>[\w.-]+))"
_LOGIN = "ssh HOST true  # by hand, once: as the job does it"
_FREE_SPACE = "df -h {run_dir} ; quota -s  # see what is full, and remove or move files"

SYSTEM: tuple[Rule, ...] = (
    # Memory of the node.
    rule(
        "out-of-memory",
        r"(?i)detected \d+ oom[-_ ]?kill|oom[-_]kill(?:er)? event"
        r"|some of your processes may have been killed by the cgroup"
        r"|task(?:s)? [\d,-]+: out of memory|exceeded (?:step |job )?memory limit",
        "The tasks used more memory than the job had{requested_memory}",
        _MORE_MEMORY,
        more_precise_than=("data-loader-worker", "python-error"),
    ),
    rule(
        "out-of-memory",
        r"killed due to the node running low on memory",  # Ray
        "A task was ended because the node ran low on memory{requested_memory}",
        _MORE_MEMORY,
        certain=False,
        more_precise_than=("python-error",),
    ),
    rule(
        "locked-memory-limit",
        r"ibv_(?:reg_mr|create_)\w*.*Cannot allocate memory|fi_mr_reg.*Cannot allocate memory",
        "The network card may lock no more memory: the limit of locked memory (ulimit -l) is too small",
        "ulimit -l  # in a job: must print unlimited; an administrator raises it for slurmd (LimitMEMLOCK)",
    ),
    rule(
        "out-of-memory",
        r"terminate called.*std::bad_alloc|std::bad_alloc"
        r"|^(?:numpy[\w.]*\._?ArrayMemoryError|MemoryError)\b.*|DefaultCPUAllocator: can't allocate memory"
        r"|^(?!.*(?:PMI|UCX|shmget|mlock|hugepage)).*(?i:cannot allocate memory)|memory allocation of \d+ bytes failed"
        r"|OutOfMemoryError\(\)|insufficient memory for the Java Runtime|\(errno=12\)|cannot allocate vector of size"
        r"|fatal error: runtime: out of memory|^Out of memory\b|insufficient virtual memory"
        r"|Error allocating \d+ bytes",
        "The program could not get more memory of the node{requested_memory}",
        _MORE_MEMORY,
        more_precise_than=(PROGRAM_ERROR,),
    ),
    rule(
        "java-heap-full",
        r"java\.lang\.OutOfMemoryError: (?P<message>.*)",
        "The Java machine used up the memory that it allows itself: {message}",
        "java -Xmx SIZE  # or JAVA_TOOL_OPTIONS=-XmxSIZE; some less than --mem. Spark: spark.driver.memory",
    ),
    rule(
        "shared-memory-full",
        r"DataLoader worker .*killed by signal: Bus error|insufficient shared memory|No space left on device.*/dev/shm"
        r"|shm.*(?:too small|No space left)|(?:failed to extend|creating shared memory segment) /dev/shm",
        "/dev/shm of the node is full: workers of a data loader, and NCCL, pass data through it",
        "df -h /dev/shm  # on the node; fewer workers, or torch.multiprocessing.set_sharing_strategy('file_system')",
        more_precise_than=("data-loader-worker",),
    ),
    # Files and file systems.
    rule(
        "inotify-limit",
        r"inotify (?:watch|instance) limit reached|inotify.*(?:No space left|Too many open files)"
        r"|System limit for number of file watchers reached",
        "The user watches as many files as the node allows; the disk is not full",
        "sysctl fs.inotify  # on the node; watch fewer folders, or turn the watcher off",
    ),
    rule(
        "quota-exceeded",
        r"(?i:disk quota exceeded)|\[Errno 122\]|EDQUOT",
        "The quota of the file system is used up{of_file}",
        "quota -s ; lfs quota -hu $USER {run_dir}  # files count as well as bytes; remove or move some",
    ),
    rule(
        "disk-full",
        r"(?:(?P<file2>/[^\s:]+): )?(?i:no space left on device)(?::? *['\"](?P<file>[^'\"]+))?|\[Errno 28\]|ENOSPC",
        "The file system is full{of_file}",
        _FREE_SPACE,
    ),
    rule(
        "file-too-large",
        r"\[Errno 27\] File too large|File size limit exceeded",
        "A file reached the largest size that is allowed (ulimit -f, or the file system's own)",
        "ulimit -f  # in the job; the key setup of the site file can raise it",
    ),
    rule(
        "read-only-filesystem",
        r"(?i:read-only file system)(?:: *['\"]?(?P<file>[^'\"]+))?",
        "The file system is read-only on the node{of_file}",
        "findmnt -T {file}  # on the node; write to the scratch or project file system",
    ),
    rule(
        "too-many-files",
        r"(?i:too many open files)|\[Errno 24\]",
        "The process has more open files than its limit (ulimit -n)",
        "ulimit -n 65536  # in the key setup of the site file; or fewer data-loader workers",
    ),
    rule(
        "too-many-processes",
        r"can't start new thread|fork: (?:retry: )?Resource temporarily unavailable"
        r"|BlockingIOError: \[Errno 11\] Resource"
        r"|OpenBLAS blas_thread_init: pthread_create failed",
        "The user or the job has as many processes and threads as are allowed (ulimit -u)",
        "{again} --env OMP_NUM_THREADS=1  # and fewer data-loader workers",
    ),
    rule(
        "stale-file-handle",
        r"(?i:stale (?:NFS )?file handle)|\[Errno 116\]",
        "A file or folder was replaced or removed on the server while it was open",
        "{again}",
    ),
    rule(
        "filesystem-failed",
        r"Transport endpoint is not connected|transport endpoint shutdown|(?i:remote I/O error|input/output error)",
        "A file system or device failed while it was read or written",
        "{again} --exclude {host}  # where other nodes can read the same file",
        certain=False,
    ),
    rule(
        "file-locked",
        r"unable to lock file, errno = 11|database is locked",
        "Another process holds the lock of a file, or the file system has no locks",
        "{again} --env HDF5_USE_FILE_LOCKING=FALSE  # for HDF5; never with several writers",
        certain=False,
    ),
    # Programs that do not start.
    rule(
        "workdir-missing",
        r"the working folder is not there on this node|chdir\((?P<file>[^)]*)\): No such file"
        r"|couldn't chdir to [`'](?P<file2>[^']+)'",
        "The working folder does not exist on the node",
        "{again} --chdir FOLDER  # one on a file system that all nodes mount",
    ),
    rule(
        "wrong-interpreter-line",
        r"env: .?(?P<program>[\w.-]+)\\r|bad interpreter: .*\^M|\$'\\r': command not found",
        "The script has the line ends of Windows",
        "sed -i 's/\\r$//' SCRIPT",
    ),
    rule(
        "interpreter-missing",
        r"(?<!\S)(?P<file>\S+): (?:/\S+: )?bad interpreter(?:\([^)]*\))?: No such file"
        r"|(?<!\S)(?P<file2>\S+): cannot execute: required file not found",
        "The program named in the first line of the script does not exist on the node",
        "head -n 1 PROGRAM  # and correct the path after #!",
    ),
    rule(
        "wrong-architecture",
        r"Exec format error|cannot execute binary file",
        "The program is no executable of this node: built for another CPU, or a script without #!",
        "file PROGRAM ; uname -m  # on the node",
    ),
    rule(
        "shared-library-missing",
        r"error while loading shared libraries: (?P<library>[^:\s]+)"
        r"|(?:OSError|ImportError): (?P<library2>[^:\s]+\.so[.\d]*): cannot open shared object file",
        "The shared library {library} is not on the node, or not on LD_LIBRARY_PATH",
        "hpcjobs sites show {site}  # does its key modules load what provides the library?",
    ),
    rule(
        "library-too-old",
        r"version [`'](?P<version>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
        "The program needs {version}, which is newer than the node's own library",
        "{again} --container IMAGE  # or install a build for this system, or load a newer compiler module",
    ),
    rule(
        "module-load-failed",
        r"Unable to locate a modulefile for ['\"](?P<module>[^'\"]+)|(?:following module\(s\) are unknown"
        r"|cannot be loaded as requested): *"
        r"[\"']?(?P<module2>[^\"'\s]+)?|Lmod has detected the following error",
        "The software module {module} cannot be loaded on the node",
        "module avail {module} ; hpcjobs sites show {site}  # and correct the key modules of the site file",
        more_precise_than=_MISSING,
    ),
    rule(
        "module-command-missing",
        r"module: command not found",
        "The shell of the job does not define `module`",
        "hpcjobs sites show {site}  # the key module_init of the site file names the script that defines it",
        more_precise_than=_MISSING,
    ),
    rule(
        "environment-missing",
        r"EnvironmentNameNotFound|EnvironmentLocationNotFound|Could not find conda environment: (?P<environment>\S+)"
        r"|(?<!\S)(?P<file>\S*/bin/activate): No such file or directory|conda: command not found",
        "The Python environment of the site does not exist on the node",
        "conda env list ; hpcjobs sites show {site}  # the key environment of the site file",
        more_precise_than=_MISSING,
    ),
    rule(
        "environment-not-activated",
        r"Your shell has not been properly configured to use 'conda activate'|Run 'conda init' before 'conda activate'",
        "`conda activate` does not work in the shell of the job: its environment was not activated",
        "source CONDA/etc/profile.d/conda.sh  # before it; or name it in the key environment of the site file",
        more_precise_than=_MISSING,
    ),
    rule(
        "container-failed",
        r"^FATAL: +(?P<message>(?:could not open image|container creation failed|while extracting|image \S+).*)"
        r"|pyxis: (?P<message2>.*(?:couldn't|failed|invalid|No such).*)",
        "The container could not be started: {message}",
        "hpcjobs container check IMAGE",
        kind=Kind.ERROR,
    ),
    rule(
        "container-failed",
        r"^FATAL: {3}(?P<message>(?!\"[^\"]+\": executable file).*)",
        "The container, or a program that prints messages like apptainer, failed: {message}",
        "hpcjobs container check IMAGE",
        kind=Kind.ERROR,
        certain=False,
    ),
    rule(
        "slurm-unavailable",
        r"Munge (?:en|de)code failed|Unable to contact slurm controller|Socket timed out on send/recv operation"
        r"|(?:Task launch for \S+ failed on node (?P<host>\S+):|Application launch failed:)",
        "Slurm's own services did not answer",
        "scontrol ping ; sinfo -R  # and tell the administrators, with this line",
        kind=Kind.ERROR,
        certain=False,
        more_precise_than=("step-refused",),
    ),
    rule(
        "step-refused",
        r"^srun: (?:fatal: (?P<message>.+)|error: (?P<message2>Unable to (?:create step(?!.*already completing)"
        r"|confirm allocation).*))",
        "srun did not start the program: {message}",
        kind=Kind.ERROR,
    ),
    rule(
        "compile-failed",
        r"^\S+:\d+:\d+: fatal error: (?P<message>.*)|^compilation terminated\."
        r"|undefined reference to [`'](?P<symbol>[^`']+)"
        r"|^make: \*\*\* (?P<message2>.*Error \d+)|^collect2: error: (?P<message3>.*)",
        "The program could not be compiled: {message} {symbol}",
        "module list  # do the modules of the job provide the headers and libraries?",
        more_precise_than=("command-missing",),
    ),
    rule(
        "command-missing",
        r"(?:: (?:line )?\d+|exec): (?P<program6>[^\s:]+): not found$"
        r"|(?:^|: )(?P<program>[^\s:]+): command not found|env: .?(?P<program2>[\w./+-]+).?: No such file"
        r"|^FATAL: +\"(?P<program7>[^\"]+)\": executable file not found"
        r"|execve\(\): *(?P<program3>\S+): No such file|error: (?:couldn't|Could not) (?:find|exec) (?P<program4>\S+)"
        r"|^(?:\S+: line \d+: )?(?P<program5>/\S+|\./\S+): No such file or directory",
        "The program {program} does not exist on the node",
        "command -v {program}  # on the node; a path in the shared file system, or the right module",
    ),
    rule(
        "not-executable",
        r"execve\(\): (?P<program>\S+): Permission denied"
        r"|^(?:\S*sh|\S+: line \d+|\S+: \d+): (?:exec: )?(?P<program2>\./\S+|\S+/bin/\S+"
        r"|\S+\.(?:sh|py|pl|exe)): Permission denied$",
        "{program} may not be executed, or a folder on the way to it may not be entered",
        "chmod +x {program}  # namei -l shows the rights of the folders; PATH may hold one that is somebody else's",
    ),
    rule(
        "ssh-denied",
        r"Permission denied \((?:publickey|password|gssapi|hostbased|keyboard)[\w,-]*\)",
        "ssh to another node was refused: it accepts none of the user's keys",
        _LOGIN,
        more_precise_than=("mpi-error",),
    ),
    rule(
        "permission-denied",
        r"^(?:\S+: ){1,3}(?:.* )?[`'\"]?(?P<file>[^\s'\":]+)[`'\"]?: Permission denied$",
        "{file} may not be read, written or executed, or a folder on the way to it may not be entered",
        "namei -l {file}  # on the node: the rights of the file and of the folders",
    ),
    # Network.
    rule(
        "host-key",
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"
        r"|No \S+ host key is known for (?P<host>\S+)",
        "ssh does not trust the host key of another node: it is new, or has changed",
        "ssh-keygen -R HOST  # if the node was installed anew; then log in once by hand",
    ),
    rule(
        "licence-missing",
        r"(?i)(?:licen[sc]e (?:checkout failed|server (?:is )?(?:down|not|un)|manager error)|any licen[sc]e server"
        r"|unable to (?:checkout|obtain|check out).{0,40}licen[sc]e|licen[sc]e manager.*error|FlexNet Licensing error"
        r"|(?:no|not enough) licen[sc]es? (?:available|found)|licensed number of users already reached)",
        "The program got no licence: the server cannot be reached from the node, or all licences are in use",
        "scontrol show licenses  # Slurm may count them: sbatch --licenses NAME; else lmutil lmstat -a on the node",
    ),
    rule(
        "port-in-use",
        r"(?i)address already in use|EADDRINUSE|server socket has failed to (?:listen|bind)",
        "A network port is in use by another process of the node",
        "{again}  # hpcjobs looks for a free port; a program must not set MASTER_PORT itself",
    ),
    rule(
        "loopback-address",
        rf"^(?=.*{OF_RANKS}|.*client socket)"
        r"(?i:.*connect.{0,60}(?:127\.0\.0\.1|\[::1\]|localhost).*(?:refused|failed|timed? ?out)"
        r"|.*(?:refused|failed|timed? ?out).{0,200}(?:remote=\[?127\.|127\.0\.0\.1|localhost\b))",
        "A rank was to be reached by the loopback address, which leads to no other host",
        "{again} --env GLOO_SOCKET_IFNAME=INTERFACE --env NCCL_SOCKET_IFNAME=INTERFACE  # ip -br addr lists them",
    ),
    rule(
        "service-unreachable",
        _SERVICE + r".*(?i:connection refused|ECONNREFUSED|\[Errno 111\]|Error 111 connecting)",
        "Nothing answers at the address of a service that the program needs (a database, tracker, proxy or download)",
        "curl -v URL  # on the node: is the service up, does it listen to other hosts, does a proxy stand between?",
        certain=False,
    ),
    rule(
        "certificate-refused",
        r"CERTIFICATE_VERIFY_FAILED|SSL certificate problem",
        "The certificate of a server is not trusted on the node: often a proxy's, or certificates are out of date",
        "{again} --env REQUESTS_CA_BUNDLE=FILE --env SSL_CERT_FILE=FILE  # the site's certificates",
    ),
    rule(
        "no-internet",
        r"(?i)urlopen error .*(?:name resolution|unreachable|timed out|not known|No route)|HTTPS?ConnectionPool\(host="
        r"|couldn't connect to 'https?:|(?:curl|wget|pip).*Could not resolve host|Could not fetch URL https?:"
        r"|HTTPS?Connection object at .*(?:No route to host|unreachable|resolution|not known|timed out)"
        r"|(?:wget|curl|pip|git|conda|fatal: unable to access)\b.*(?:No route to host|unreachable|timed out)",
        "The program needs something from the internet, which nodes of a cluster often cannot reach",
        "{again} --env HF_HUB_OFFLINE=1  # after the download has been done on the login node",
        certain=False,
        more_precise_than=("host-unknown", "network-unreachable"),
    ),
    rule(
        "host-unknown",
        r"(?i)(?:gaierror.*|getaddrinfo.*|could not resolve host|hostname.*|gai error.*)(?:name or service not known"
        r"|Temporary failure in name resolution|No address associated)|socket\.gaierror",
        "A host name has no address on the node",
        "getent hosts NAME  # on the node; address_suffix of the site file must fit /etc/hosts",
    ),
    rule(
        "node-failed",
        r"(?:Node failure on (?P<host>\S+)|error: Aborting, (?P<host2>\S+) is down)"
        r"|DUE TO NODE (?:(?P<host3>\S+) )?FAILURE",
        "The node failed",
        "{again} --exclude {host}",
    ),
    rule(
        "step-time-limit",
        r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT",
        "A step of the job reached its time limit: its own (srun --time), or that of the job",
        "sacct -j {job} --format=JobID,State,Elapsed,Timelimit  # shows which of both",
    ),
    rule(
        "time-limit",
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "The job reached its time limit{time_limit}",
        "{again} --time {more_time}",
        more_precise_than=("step-time-limit",),
    ),
    rule(
        "preempted",
        r"CANCELLED AT \S+ DUE TO PREEMPTION",
        "The job was preempted: another job took its nodes",
        "{again} --retries on",
    ),
    rule(
        "cancelled",
        r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*",
        "The job was cancelled: by somebody's scancel, or by a program that watches it",
        "{again}",
        certain=False,
    ),
)

_BAD_NODE = "{again} --exclude {host}  # and tell the administrators"
_FIXES = {
    gpu_errors.BROKEN: _BAD_NODE,
    gpu_errors.NOT_READY: _BAD_NODE,
    gpu_errors.MISSING: "{again} --gpus-per-node 1",
}
"""Commands for a job, where the table has none or one for a trainer."""

GPU: tuple[Rule, ...] = (
    *(
        rule(error.cause, error.pattern, error.text, _FIXES.get(error, error.fix))
        for error in gpu_errors.KINDS
        if error.effect != gpu_errors.RANK_LOST  # a consequence: among the rules of ranks
    ),
    rule(
        gpu_errors.FULL.cause,
        r"RESOURCE_EXHAUSTED: .*(?i:out of memory|failed to allocate)",  # JAX, TensorFlow
        gpu_errors.FULL.text,
        "a smaller batch",
    ),
    rule(
        gpu_errors.MISSING.cause,
        r"No devices were found",  # nvidia-smi
        gpu_errors.MISSING.text,
        "{again} --gpus-per-node 1",
    ),
    rule(
        "gpu-busy",
        r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy",
        "The GPU is used by another process and admits one only (compute mode), or its driver gives it to nobody",
        "nvidia-smi  # on the node: the column Compute M. and the processes; two ranks must not take the same GPU",
        certain=False,
    ),
    rule(
        "gpu-assertion",
        r"device-side assert triggered|CUDA error: an illegal memory access",
        "A kernel on the GPU met a wrong index or address; often a label outside the number of classes",
        "{again} --env CUDA_LAUNCH_BLOCKING=1  # names the line",
    ),
    rule(
        "gpu-kernel-failed",
        r"unspecified launch failure|CUDA error: (?:misaligned address|an illegal instruction|hardware stack error"
        r"|invalid program counter)|Memory access fault by GPU node|HSA_STATUS_ERROR_EXCEPTION",
        "A kernel on the GPU was ended: mostly by a wrong address in the program or in an extension",
        "{again} --env CUDA_LAUNCH_BLOCKING=1 --env AMD_SERIALIZE_KERNEL=3  # names the line",
        certain=False,
    ),
)
