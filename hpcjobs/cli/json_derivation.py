"""Makes types for ``--json`` of other packages' types, so that a field is written down once."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from hpcjobs.cli.json_documents import Document


def derive(source: type, name: str | None = None, /, **changed: Any) -> Any:
    """The type of what is printed of ``source``, a struct or named tuple: its fields, and those of ``changed``."""
    hints = get_type_hints(source)
    names = getattr(source, "__struct_fields__", None) or getattr(source, "_fields")  # noqa: B009 # of a named tuple
    fields = {field: hints[field] for field in names} | changed
    return make_type(name or source.__name__, (source.__doc__ or "").split("\n\n")[0].strip(), **fields)


def make_type(name: str, doc: str, /, **fields: Any) -> Any:
    """A document of these fields; its name and ``doc`` are those of docs/json.md."""
    return msgspec.defstruct(
        name, list(fields.items()), bases=(Document,), namespace={"__doc__": doc}, frozen=True, kw_only=True
    )


def extend(document: type[Document], /, **fields: Any) -> Any:
    """``document`` with further fields, whose types are of packages that only this verb needs."""
    return msgspec.defstruct(
        document.__name__,
        [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in fields.items()],
        bases=(document,),
        namespace={"__doc__": document.__doc__},
        frozen=True,
        kw_only=True,
    )


def list_of(kind: Any) -> Any:
    """``list[kind]``, which type checkers refuse for a type that is made while the program runs."""
    return list[kind]
