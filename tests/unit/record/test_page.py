"""The tables of docs/metrics.md are the types of hpcjobs.record; GOLDEN=write makes them anew."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hpcjobs.record import manifest, metrics, monitor, summary

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "metrics.md"
MARK = re.compile(r"(<!-- table of (\w+)\.(\w+), made by tests/unit/record/test_page\.py -->\n).*?(<!-- end -->)", re.S)
MODULES = {"summary": summary, "metrics": metrics, "monitor": monitor, "manifest": manifest}


def read_docs(module: Any) -> dict[str, dict[str, str]]:
    """Class -> field -> its docstring, in the order of the source; a field without one has the docstring before it."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = docs.setdefault(node.name, {})
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                fields[item.target.id] = ""
            elif isinstance(item, ast.Expr) and fields and isinstance(item.value, ast.Constant):
                fields[list(fields)[-1]] = " ".join(str(item.value.value).split())
    return docs


def name_type(kind: Any) -> str:
    """The type as a reader of JSON knows it."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if type(None) in get_args(kind) or (options and not hasattr(kind, "__origin__")):
        return " or ".join(dict.fromkeys(map(name_type, options)))
    origin = getattr(kind, "__origin__", None)
    if origin in (list, tuple):
        return f"list of {name_type(get_args(kind)[0])}"
    fields = getattr(kind, "_fields", None) or getattr(kind, "__dataclass_fields__", None)
    if fields is not None:
        return "{" + ", ".join(fields) + "}"
    return {str: "text", bool: "true or false", int: "integer", float: "number"}.get(kind, "object")


def make_rows(module: Any, name: str) -> Iterator[str]:
    """The table of a type."""
    yield "\n| key | type | meaning |\n|---|---|---|\n"
    hints = get_type_hints(getattr(module, name))
    for field, text in read_docs(module)[name].items():
        shown = re.sub(r"(?<!`)`(?!`)", "`", text).replace("``", "`").replace("|", r"\|")
        yield f"| `{field}` | {name_type(hints[field])} | {shown} |\n"
    yield "\n"


def test_the_tables_of_the_page_are_the_types_of_the_package() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = MARK.sub(lambda match: match[1] + "".join(make_rows(MODULES[match[2]], match[3])) + match[4], page)
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(made, encoding="utf-8")
    assert page == made, "GOLDEN=write .venv/bin/pytest tests/unit/record/test_page.py writes docs/metrics.md"


def test_every_line_of_metrics_has_a_table() -> None:
    tables = {(module, name) for _, module, name, _ in MARK.findall(PAGE.read_text(encoding="utf-8"))}
    assert tables >= {("metrics", kind.__name__) for kind in metrics.LINES.values()}
    assert tables >= {("summary", "RunSummary"), ("monitor", "Head"), ("monitor", "Sample")}
