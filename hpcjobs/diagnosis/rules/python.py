"""Rules about errors that Python programs end with."""

from __future__ import annotations

from hpcjobs.diagnosis.rules.rule import PROGRAM_ERROR, Rule, rule
from hpcjobs.diagnosis.values import Kind

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
