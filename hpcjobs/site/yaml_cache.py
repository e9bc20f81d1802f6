"""Caches the content of YAML files from one command to the next.

Importing the parser takes longer than everything else that is done with a site file: without this cache
``hpcjobs submit --dry-run`` takes 1.15 times the CPU time, and ``hpcjobs sites`` 1.13 times. An entry is used only for
exactly the same text, so it cannot be out of date.
"""

from __future__ import annotations

import marshal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcjobs.files import cache_dir, write_beside

_MOST_FILES = 16


def read_tree(path: Path, text: str) -> Any:
    """What ``text``, the content of the file ``path``, says.

    Raises:
        ConfigError: it is no YAML.
    """
    cache = cache_dir() / f"yaml-{sys.implementation.cache_tag}"
    trees: dict[str, tuple[str, Any]] = {}
    with suppress(OSError, ValueError, EOFError, TypeError):  # there is no cache, or half of one
        trees = marshal.loads(cache.read_bytes())
    cached_text, tree = trees.pop(str(path), (None, None))
    if cached_text == text:
        return tree
    from hpcjobs.site.yaml_text import parse

    tree = parse(path, text)
    newest = dict([*trees.items(), (str(path), (text, tree))][-_MOST_FILES:])
    with suppress(OSError, ValueError):  # a home that cannot be written, or a date: it costs time, not the job
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_beside(cache, marshal.dumps(newest), durable=False)
    return tree
