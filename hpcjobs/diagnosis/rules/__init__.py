"""The rules by which lines of logs are explained, in the order in which they are tried: specific ones first."""

from __future__ import annotations

from hpcjobs.diagnosis.rules.distributed import DISTRIBUTED
from hpcjobs.diagnosis.rules.gpu import GPU
from hpcjobs.diagnosis.rules.python import PYTHON
from hpcjobs.diagnosis.rules.rule import Rule
from hpcjobs.diagnosis.rules.system import SYSTEM

RULES: tuple[Rule, ...] = (*SYSTEM, *GPU, *DISTRIBUTED, *PYTHON)
"""The first rule whose pattern is in a line explains the line."""

ERROR_SIGNS: tuple[str, ...] = (
    *("err", "exce", "fail", "kill", "abort", "refused", "denied", "lost", "closed", "reset", "broken", "terminat"),
    *("cancel", "signal", "timed out", "timeout", "time limit", "limit", "deadline", "unable", "cannot", "can't"),
    *("couldn't", "could not", "no ", "not ", "notfound", "missing", "too ", "in use", "inuse", "quota", "edquot"),
    *(
        "enospc",
        "memor",
        "bad_alloc",
        "bus ",
        "insufficient",
        "invalid",
        "unknown",
        "illegal",
        "assert",
        "exec",
        "exit",
    ),
    *("interrupt", "shut", "stale", "read-only", "unreachable", "xid", "ecc", "nvlink", "nccl", "busy", "world", "nan"),
    *("duplicate gpu", "fallen off", "mismatch", "undefined symbol", "af_inet"),
    *(
        "finite",
        "loss is",
        "loss b",
        "loss has",
        "unavailable",
        "warn",
        "unspecified",
        "forward compat",
        "kernel image",
        "sm_",
        "transport",
        "shm",
        "forcing",
    ),
    *(
        "unexpected",
        "does not",
        "option",
        "argument",
        "ifa ",
        "interface",
        "rpc",
        "^m",
        "\\r",
        "wait ",
        "pmi",
        "destroyed",
        "fatal",
        "conda",
        "pyxis",
        "certificate",
        "licen",
    ),
)
"""Parts of lines in small letters, one of which is in every line that a rule explains: others need not be tried."""


def may_explain(text: str) -> bool:
    """Whether a rule may explain this line, by a search that costs a hundredth of trying them all."""
    small = text.lower()
    return any(sign in small for sign in ERROR_SIGNS)
