"""Rules about the messages of language runtimes when an error ends a program; Python's are in `python`."""

from __future__ import annotations

import re

from hpcjobs.diagnosis.rules.rule import PROGRAM_ERROR, Rule, rule
from hpcjobs.diagnosis.values import Kind

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
