"""The rules by which lines of logs are explained, in the order in which they are tried: specific ones first."""

from __future__ import annotations

from hpcjobs.diagnosis.rules.distributed import DISTRIBUTED
from hpcjobs.diagnosis.rules.gpu import GPU
from hpcjobs.diagnosis.rules.python import PYTHON
from hpcjobs.diagnosis.rules.rule import Rule
from hpcjobs.diagnosis.rules.system import SYSTEM

RULES: tuple[Rule, ...] = (*SYSTEM, *GPU, *DISTRIBUTED, *PYTHON)
"""The first rule whose pattern is in a line explains the line."""
