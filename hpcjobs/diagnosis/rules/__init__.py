"""The rules that explain lines of logs, in the order of trial: specific ones first.

Here are the rules about ranks that talk to each other, and about the errors that programs end with.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.rules.system import GPU, PROGRAM_ERROR, SYSTEM, Rule, rule
from hpcjobs.diagnosis.values import Kind

_PARSER: Final[Any] = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
"""The parser of `re`: it has no public name, and no other one knows its syntax completely."""
_CHECK_NODES = "hpcjobs fabric --site {site}  # measures the network between nodes"

DISTRIBUTED: tuple[Rule, ...] = (
    rule(
        "mpi-not-started-by-slurm",
        r"^.*not built with SLURM's PMI support|PMI2?_Init failed|PMIX?_Init.*(?:fail|error)"
        r"|Invalid MPI plugin name|MPI type \S+ is not|no PMIx server was reachable",
        "srun and this MPI library do not speak the same PMI",
        "srun --mpi=list ; hpcjobs sites show {site}  # the key mpi of the site file names one of them",
    ),
    rule(
        "world-size",
        r"this task sees a world of (?P<seen>\S+) and not of (?P<expected>\d+)"
        r"|WORLD_SIZE is (?P<seen2>\S+), expected (?P<expected2>\d+)",
        "A rank saw a world of {seen} instead of {expected} ranks: the launcher did not start one world",
        "srun --mpi=list ; hpcjobs sites show {site}  # the key mpi of the site file must fit the MPI library",
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

PYTHON: tuple[Rule, ...] = (
    rule(
        "python-module-missing",
        r"(?:ModuleNotFoundError|ImportError): No module named ['\"]?(?P<module>[\w.]+)"
        r"|No module named (?P<module2>[\w.]+)$",
        "The Python module {module} is not installed where the job runs",
        "{install}",
        "or name a Python that has it: {other_python}",
    ),
    rule(
        "python-import-failed",
        r"ImportError: (?P<message>.+)|(?P<message2>numpy\.(?:dtype|ufunc|ndarray) size changed.*)"
        r"|(?P<message3>A module that was compiled using NumPy 1.* cannot be run in NumPy 2.*)",
        "A Python module could not be imported: {message}",
        "{python} -c 'import MODULE'  # on the node",
    ),
    rule(
        "file-missing",
        r"FileNotFoundError: (?:\[Errno 2\] )?[^'\"]*['\"](?P<file>[^'\"]+)"
        r"|can't open file '(?P<file2>[^']+)': \[Errno 2\]|(?:data|checkpoint)\S* (?P<file3>/\S+) (?:is not there"
        r"|does not exist)",
        "The file {file} does not exist on the node",
        "ls -l {file}  # on the node; a path that all nodes see",
    ),
    rule(
        "permission-denied",
        r"PermissionError: (?:\[Errno 13\] )?[^'\"]*['\"](?P<file>[^'\"]+)|PermissionError: (?P<file2>.+)",
        "The program may not read or write {file}",
        "ls -ld {file}  # and its folders",
    ),
    rule(
        "access-refused",
        r"gated repo|(?:401|403) Client Error|HTTP Error 40[13]\b|Invalid user token|RepositoryNotFoundError",
        "A server refused access: the program sent no token, or one without the right to this file",
        "{again} --env HF_TOKEN=TOKEN  # of an account that may read it; or download it on the login node",
        certain=False,
        more_precise_than=("python-error",),
    ),
    rule(
        "not-a-number",
        r"(?i)loss (?:is|became|has become) (?:nan|inf|not finite)|loss is not finite|NaN or Inf found"
        r"|FloatingPointError",
        "The loss became infinite or no number",
        "a smaller learning rate, gradient clipping, or bf16 instead of fp16",
    ),
    rule(
        "checkpoint-unusable",
        r"Error\(s\) in loading state_dict|PytorchStreamReader failed|_pickle\.UnpicklingError|invalid magic number"
        r"|no checkpoint .*can be loaded",
        "A checkpoint cannot be loaded: it is damaged, or of another model",
        "ls -l {run_dir}/checkpoints",
    ),
    rule(
        "extension-build-failed",
        r"Error building extension '(?P<extension>[^']+)'|CUDAMismatchException|nvcc fatal +: (?P<message>.*)"
        r"|Ninja is required to load C\+\+ extensions|CUDA_HOME environment variable is not set"
        r"|Failed to find C compiler",
        "An extension {extension} in C++ or CUDA could not be compiled on the node: {message}",
        "command -v nvcc g++ ninja  # on the node; CUDA as torch.version.cuda; build it before, on the login node",
        more_precise_than=("python-error",),
    ),
    rule(
        "variable-missing",
        r"KeyError: '(?P<variable>[A-Z][A-Z0-9_]{2,})'",
        "The environment variable {variable} is not set, or a key of this name is missing",
        "{again} --env {variable}=VALUE",
        certain=False,
    ),
    rule(
        "usage-error",
        r"error: (?:\w+: )?(?P<message>(?:unrecognized arguments|the following arguments are required"
        r"|(?:unknown )?argument \S+|invalid choice).*)"
        r"|(?P<message2>No such option:? \S+)|Error: Got unexpected extra argument"
        r"|^(?P<message3>Could not override '[^']*')|^(?P<message4>Key '[^']*' is not in struct)",
        "The program does not accept its arguments: {message}",
        "PROGRAM --help",
    ),
    rule(
        "encoding-error",
        r"Unicode(?:Encode|Decode)Error: (?P<message>.+)",
        "Text could not be read or written in the node's encoding",
        "{again} --env PYTHONUTF8=1",
    ),
    rule(
        "syntax-error",
        r"(?P<message>(?:SyntaxError|IndentationError|TabError): .+)",
        "{message}",
        "python -m py_compile PROGRAM  # a newer syntax needs a newer Python on the node",
    ),
    rule(
        "data-loader-worker",
        r"DataLoader worker .*(?:exited unexpectedly|is killed by signal: (?P<signal>\w+))",
        "A worker process of the data loader died; often of too little memory",
        "{again} --mem {more_memory}",
        certain=False,
    ),
    rule(
        PROGRAM_ERROR,
        r"^Error: (?P<message>.+)$",
        "The program ended with its own error message: {message}",
        kind=Kind.ERROR,
        certain=False,
    ),
    rule(
        "python-error",
        r"^(?P<error>(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Exit|Interrupt)\b)(?:: (?P<message>.*))?$",
        "The program ended with {error}: {message}",
        kind=Kind.ERROR,
    ),
    rule(
        PROGRAM_ERROR,
        r"^error: (?P<message>.+?)(?:\. Hint: .*)?$",
        "The program ended with its own error message: {message}",
        kind=Kind.ERROR,
    ),
)

LAST_WORDS = re.compile(
    "|".join(
        (
            r"^Exception in thread \"main\" (?P<message>.+)",  # Java, Scala, Kotlin
            r"^ERROR: LoadError: (?P<message2>.+)",  # Julia
            r"^Error (?:in .*|: .*|using .*)\bError: (?P<message3>.+)",  # R, with the call before the message
            r"^Error in (?P<message4>.+)",  # R
            r"^\{?Error using (?P<message5>.+)",  # MATLAB
            r"^thread '[^']*' (?:\(\d+\) )?panicked at (?P<message6>.+)",  # Rust
            r"^panic: (?P<message7>.+)|^fatal error: (?P<message14>.+)",  # Go
            r"^terminate called after throwing an instance of '(?P<message8>[^']+)'",  # C++
            r"^(?:\*+ )?Fortran runtime error: (?P<message9>.+)",
            r"^forrtl: (?:severe|error) \(\d+\): (?!SIG)(?P<message10>.+)",
            r"^(?P<message11>ERROR STOP\b.*)",
            r"^Uncaught (?P<message12>\w*(?:Error|Exception)\b.*)",  # JavaScript, PHP
            r"^(?P<message13>.+) at \S+\.p[lm] line \d+\.$",  # Perl
        )
    )
)
"""Messages of runtimes when an error ends the program."""

LANGUAGES: tuple[Rule, ...] = (
    rule(
        "symbol-missing",
        r"symbol lookup error: (?P<library>[^:]+):.*undefined symbol: (?P<symbol>\w+)",
        "{library} needs the symbol {symbol}, which the loaded libraries lack: they are of another version",
        "ldd {library}  # on the node: which of the libraries comes from another module or environment?",
        kind=Kind.ERROR,
    ),
    rule(
        PROGRAM_ERROR,
        LAST_WORDS.pattern,
        "The program ended with its own error: {message}",
        kind=Kind.ERROR,
    ),
    rule(
        PROGRAM_ERROR,
        r"^(?:ERROR|FATAL|CRITICAL) *: +(?P<message>.+)$",
        "The program ended with its own error message: {message}",
        kind=Kind.ERROR,
        certain=False,
    ),
)

RULES: tuple[Rule, ...] = (*SYSTEM, *GPU, *DISTRIBUTED, *PYTHON, *LANGUAGES)
"""The first matching rule explains the line."""


def find_required_texts(pattern: re.Pattern[str]) -> frozenset[str]:
    """Find texts in small letters: every match of ``pattern`` contains at least one of them.

    Raises ValueError: the pattern requires no text, so that it had to be tried on every line.
    """
    required = _require(_PARSER.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
    if not required:
        raise ValueError(f"{pattern.pattern} has an alternative without a text of its own")
    return required


def _require(parsed: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The set of texts that a sequence requires, with the longest shortest text; empty if it requires no text."""
    sets, literal = [frozenset[str]()], ""
    for operation, argument in parsed:
        name = str(operation)
        if name == "LITERAL":
            literal += chr(argument).lower()
            continue
        if literal:
            sets.append(frozenset({literal}))
        literal = ""
        if name == "SUBPATTERN":
            sets.append(_require(argument[-1]))
        elif name == "BRANCH":
            branches = [_require(branch) for branch in argument[1]]
            sets.append(frozenset().union(*branches) if all(branches) else frozenset())
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] > 0:
            sets.append(_require(argument[2]))
    if literal:
        sets.append(frozenset({literal}))
    return max(sets, key=lambda texts: min(map(len, texts), default=0))


@cache
def _signs() -> tuple[str, ...]:
    """Texts in small letters; every line that a rule explains contains one of them. The shortest come first."""
    required = {text for rule in RULES for text in find_required_texts(rule.pattern)}
    signs: list[str] = []
    for text in sorted(required, key=len):
        if not any(sign in text for sign in signs):
            signs.append(text)
    return tuple(signs)


def may_explain(text: str) -> bool:
    """Whether a rule may explain this line. This costs a fraction of trying all rules."""
    small = text.lower()
    return any(sign in small for sign in _signs())
