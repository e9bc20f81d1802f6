"""The rules that explain lines of logs, in the order of trial: specific ones first."""

from __future__ import annotations

from functools import cache

from hpcjobs.diagnosis.rules.distributed import DISTRIBUTED
from hpcjobs.diagnosis.rules.gpu import GPU
from hpcjobs.diagnosis.rules.languages import LANGUAGES
from hpcjobs.diagnosis.rules.python import PYTHON
from hpcjobs.diagnosis.rules.rule import Rule, find_required_texts
from hpcjobs.diagnosis.rules.system import SYSTEM

RULES: tuple[Rule, ...] = (*SYSTEM, *GPU, *DISTRIBUTED, *PYTHON, *LANGUAGES)
"""The first matching rule explains the line."""


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
