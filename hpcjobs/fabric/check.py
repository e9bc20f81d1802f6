"""``python -m hpcjobs.fabric.check``: on the first node of a job, measures all of its nodes and names the bad ones.

In this order, because each step uses the nodes that passed the step before:

    who answers      an agent on every node, each a separate step, has some seconds to send its address
    who reaches whom round trips between all pairs, by the chosen interface and the names that trainers use
    how fast         streams between pairs, both ways, one pair of a node at a time; memory; the CUDA and MPI program
    GPUs             where the job has some, one process for each: products, memory, links, NCCL
    together         all-reduce of MPI, torch and Horovod over the nodes that are left

Writes ``fabric.json`` into the run folder, appends to the site's record of nodes, and ends with 19 if a node is bad.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from hpcjobs.fabric.measurements import (
    greet,
    measure_allreduce,
    measure_gpus,
    measure_latency,
    measure_memory,
    measure_network,
    measure_products,
    requests_gpus,
)
from hpcjobs.fabric.nodes import HostGroup, agents
from hpcjobs.fabric.report import Findings, collectives, gpu_table, remember, report, table
from hpcjobs.fabric.verdict import TOLERANCE, Judged, NodeMeasurements, best, judge, outliers
from hpcjobs.files import write_beside
from hpcjobs.runtime.hostlist import hosts_of

NODE_IS_BAD = 19
QUICK_S = 60.0
"""Limit of a check before a job, for any number of nodes: the rest stays unmeasured."""
FULL_S = 120.0
"""Limit of the full measurement; the report names the unfinished parts."""
LEAVING_S = 5.0
AGAIN = 2
"""Repeats for a rate that is an outlier: a short disturbance does not make a node bad."""
PROGRAM_S = 20.0
"""Kept for the CUDA and MPI program where time is short."""
ALLREDUCE_S = 25.0
"""Kept for each of torch and Horovod."""
GPUS_S = 25.0
"""Kept for the processes of the GPUs, most of it for loading torch."""
_BY_AGENTS = ("network_bytes_per_s", "memory_bytes_per_s")


def check(
    place: HostGroup,
    folder: Path,
    *,
    quick: bool,
    tolerance: float,
    announce: Callable[[str], None] = lambda text: None,
) -> Findings:
    """Measure every node of ``place``; programs leave their figures in ``folder``. ``announce`` gets the next step.

    Of a rate that is measured again the best one counts.
    """
    end = time.monotonic() + (QUICK_S if quick else FULL_S) - LEAVING_S
    with_gpus = requests_gpus(os.environ)
    until = (end if quick else end - 2 * ALLREDUCE_S) - (GPUS_S if with_gpus else 0.0)
    findings = Findings([NodeMeasurements(host) for host in place.hosts])
    by_host = {node.host: node for node in findings.nodes}

    def begin(step: int, text: str) -> None:
        announce(f"step {step} of {3 if quick else 4}: {text}; at most {end - time.monotonic():.0f} s left")

    begin(1, f"do {len(place.hosts)} nodes answer")
    with agents(place) as all_agents:
        peers = greet(all_agents, by_host, suffix=place.suffix)
        present = [agent for agent in all_agents if agent.host in peers]
        if len(place.hosts) > 1:
            measure_latency(present, by_host, peers)
        # Who cannot be reached would make slow pairs of sound nodes.
        sound = [agent for agent in present if not by_host[agent.host].failures]
        begin(2, f"network and memory of {len(sound)} nodes")
        for _ in range(1 + AGAIN):
            began = time.monotonic()
            if len(sound) > 1:
                measure_network(sound, by_host, peers, until=until)
            measure_memory(sound, by_host)
            again = _ends_before(until - PROGRAM_S, began)
            if not again or not outliers(findings.nodes, *_BY_AGENTS, tolerance=tolerance):
                break
    sound_nodes = [node for node in findings.nodes if not node.failures]
    if sound_nodes:
        begin(3, "matrix products")
        for _ in range(1 + AGAIN):
            began = time.monotonic()
            measure_products(place, sound_nodes, findings, folder, quick=quick, until=until)
            if not _ends_before(until, began) or not outliers(findings.nodes, "flops", tolerance=tolerance):
                break
        if with_gpus:
            begin(3, "GPUs, a process for each")
            gpus_until = end if quick or len(sound_nodes) == 1 else end - 2 * ALLREDUCE_S
            measure_gpus(place, sound_nodes, findings, folder, quick=quick, tolerance=tolerance, until=gpus_until)
            sound_nodes = [node for node in sound_nodes if not node.failures]
        if not quick and len(sound_nodes) > 1:
            begin(4, "all-reduce over the nodes")
            measure_allreduce(place, sound_nodes, findings, folder, until=end)
    return findings


def _ends_before(until: float, began: float) -> bool:
    """Whether the work since ``began`` could be repeated before the deadline."""
    now = time.monotonic()
    return now + (now - began) < until


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description=__doc__)
    parser.add_argument("--interface")
    parser.add_argument("--suffix", default="")
    parser.add_argument("--mpi")
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--record", type=Path, help="append the verdicts to this file")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--quick", action="store_true", help="no collectives")
    parser.add_argument("--choose", type=int, help="so many of the nodes are needed; the best are named in `chosen`")
    parser.add_argument("--keep-first", action="store_true", help="this node must be among those chosen")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    begun = time.monotonic()
    listed = os.environ.get("SLURM_JOB_NODELIST")
    hosts = tuple(hosts_of(listed)) if listed else (socket.gethostname(),)
    place = HostGroup(hosts, bool(listed), args.mpi, args.cpus_per_task, args.interface, args.suffix)
    folder = Path(os.environ["HPCJOBS_RUN_DIR"])
    (folder / "fabric").mkdir(exist_ok=True)
    findings = check(
        place,
        folder / "fabric",
        quick=args.quick,
        tolerance=args.tolerance,
        announce=lambda text: print(text, flush=True) if args.choose is None else None,  # not in a job's own log
    )
    judged = judge(findings.nodes, tolerance=args.tolerance)
    chosen = None if args.choose is None else best(judged, args.choose, keep=hosts[0] if args.keep_first else None)
    if args.record is not None and (problem := remember(args.record, judged)):
        findings.notes.append(problem)
    report(findings, judged, chosen, took_s=time.monotonic() - begun).write(folder)
    for line in chain(
        table(judged), gpu_table(findings.gpus), collectives(findings), (f"note: {note}" for note in findings.notes)
    ):
        print(line, flush=True)
    return _report_outcome(judged, chosen, args.choose, folder)


def _report_outcome(judged: Sequence[Judged], chosen: list[str] | None, needed: int | None, folder: Path) -> int:
    """The exit code; where nodes are chosen, their names go to ``nodes.chosen``, one a line."""
    bad = [each.node.host for each in judged if not each.good]
    if needed is None or chosen is None:
        if bad:
            print(f"hpcjobs: bad: {', '.join(bad)}", flush=True)
        return NODE_IS_BAD if bad else 0
    if len(chosen) < needed:
        lack = f"{len(chosen)} are left" if chosen else "the first must be one of them"
        print(f"hpcjobs: {needed} good nodes are needed, and {lack}; bad: {', '.join(bad)}", flush=True)
        return NODE_IS_BAD
    write_beside(folder / "nodes.chosen", "".join(f"{host}\n" for host in chosen), mode=None)
    left = [each.node.host for each in judged if each.node.host not in chosen]
    print(f"hpcjobs: runs on {', '.join(chosen)}" + (f", without {', '.join(left)}" if left else ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
