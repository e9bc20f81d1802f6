"""The last collectives of this rank, from torch's flight recorder (`TORCH_FR_BUFFER_SIZE` entries, 2000 by default).

The recorder of NCCL is one, that of gloo another; either may be missing from a build of torch. A program that has
not loaded torch has none.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

BINDINGS = "torch._C._distributed_c10d"
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
EVERYONE = "default_pg"


@dataclass(frozen=True)
class Collective:
    """One call, as it was begun: a number that ranks of a group count alike, and whether it has ended."""

    number: int
    name: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    ended: bool
    began_ns: int  # since 1970

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.number} {self.name}({shapes}) in {self.group}: {'ended' if self.ended else 'not ended'}"


def collectives() -> list[Collective]:
    """The collectives in the order they were begun; none where this torch records nothing, or its recorder is off."""
    bindings = sys.modules.get(BINDINGS)
    entries = [call for name in RECORDERS if (dump := getattr(bindings, name, None)) for call in _read(dump())]
    return sorted(entries, key=lambda call: call.began_ns)


def begun(calls: list[Collective]) -> int:
    """How many collectives of all ranks this one has begun, in each recorder's own count."""
    newest: dict[str, int] = {}
    for call in calls:
        if call.group == EVERYONE:
            backend = call.name.partition(":")[0]
            newest[backend] = max(call.number, newest.get(backend, 0))
    return sum(newest.values())


def _read(dump: bytes) -> list[Collective]:
    entries: list[dict[str, Any]] = json.loads(dump).get("entries", [])
    return [
        Collective(
            number=entry["collective_seq_id"],
            name=entry["profiling_name"],
            group=entry["process_group"][1],
            shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
            ended=entry["retired"],
            began_ns=entry["time_created_ns"],
        )
        for entry in entries
        if not entry["is_p2p"]
    ]
