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
import contextlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import IO, Any

from hpcjobs import gpu_errors
from hpcjobs.fabric.verdict import (
    TOLERANCE,
    Findings,
    Judged,
    NodeMeasurements,
    best,
    collectives,
    gpu_table,
    judge,
    judge_gpus,
    outliers,
    remember,
    report,
    table,
)
from hpcjobs.files import write_beside
from hpcjobs.processes.start import own_module_words, start
from hpcjobs.record.fabric import AllReduce, GpuReport
from hpcjobs.record.values import convert
from hpcjobs.slurm_commands import FENCES, read_hosts, start_on

_LEAVE_S = 5.0


@dataclass(frozen=True)
class HostGroup:
    """The hosts of the job, and how to start programs on them (no ``srun``: this machine)."""

    hosts: tuple[str, ...]
    srun: bool
    mpi: str | None
    cpus_per_task: int | None
    interface: str | None
    suffix: str

    def srun_command(self, hosts: Sequence[str], *, mpi: str | None) -> list[str]:
        """Before a command that is to run once on each of ``hosts``."""
        if not self.srun:
            return []
        options = ["--kill-on-bad-exit=1"]
        options += [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task is not None else []
        return start_on(hosts, *options, *([f"--mpi={mpi}"] if mpi is not None else []))

    def module(self, hosts: Sequence[str], name: str, *arguments: str, mpi: str | None) -> list[str]:
        """The command that runs a Python module once on each of ``hosts``."""
        return [*self.srun_command(hosts, mpi=mpi), sys.executable, "-u", *own_module_words(name), *arguments]

    def world(self, hosts: Sequence[str]) -> dict[str, str]:
        """The variables of a program over ``hosts``, with a smaller world than the job's."""
        if not self.srun:
            return {}
        size = str(len(hosts))
        by = f"srun --mpi={self.mpi}" if self.mpi else "srun"
        variables = {"HPCJOBS_NTASKS": size, "HPCJOBS_NNODES": size, "HPCJOBS_LAUNCHED_BY": by}
        variables |= dict([FENCES]) if FENCES[0] not in os.environ else {}
        return variables | {"MASTER_ADDR": hosts[0] + self.suffix, "SLURM_JOB_NUM_NODES": size}


class Agent:
    """One node's agent, from this side."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self.host, self._number = host, 0
        self._lines: queue.Queue[str] = queue.Queue()
        self._complaints: list[str] = []
        self._process = start(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, new_session=True)
        self._readers = [
            threading.Thread(target=_hand_over, args=pair, daemon=True)
            for pair in ((self._process.stdout, self._lines.put), (self._process.stderr, self._complaints.append))
        ]
        for reader in self._readers:
            reader.start()

    def ask(self, **request: object) -> None:
        """Send a request; an agent that has ended does not read it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._number += 1
            self._process.stdin.write(json.dumps({"number": self._number, **request}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """The answer to the last question (at first: its name), by ``deadline`` (monotonic); None: not yet."""
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                message: dict[str, Any] = json.loads(self._lines.get(timeout=min(left, 0.2)))
                if message["number"] == self._number:
                    answer: dict[str, Any] = message["answer"]
                    return answer
            if self._process.poll() is not None and self._lines.empty():
                return None
        return None

    @property
    def complaint(self) -> str:
        """The last error message of the agent or of srun."""
        lines = [line.strip() for line in self._complaints]
        return next((line for line in lines if "error" in line), lines[-1] if lines else "")

    def leave(self) -> None:
        """Let it go, by force after some seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        end(self._process, patience_s=_LEAVE_S)
        for reader in self._readers:
            reader.join(_LEAVE_S)


def _hand_over(lines: IO[bytes], take: Callable[[str], None]) -> None:
    with lines:
        for line in lines:
            take(line.decode("utf-8", "replace"))


def end(process: Popen[bytes], *, patience_s: float) -> None:
    """Wait for a process, then end it and its group: TERM first, so that srun ends its tasks."""
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        with contextlib.suppress(TimeoutExpired):
            process.wait(patience_s)
            return
        if number is not None:
            os.killpg(process.pid, number)
    process.wait()


@contextlib.contextmanager
def agents(place: HostGroup) -> Iterator[list[Agent]]:
    """One on every host, started; they leave at the end."""
    flags = ["--interface", place.interface] if place.interface else []
    flags += ["--alone"] if len(place.hosts) == 1 else []
    name = "hpcjobs.fabric.agent"
    agents = [Agent(host, place.module((host,), name, *flags, mpi="none")) for host in place.hosts]
    try:
        yield agents
    finally:
        with ThreadPoolExecutor(len(agents)) as pool:
            list(pool.map(Agent.leave, agents))


class Failed(Exception):
    """A program over several nodes failed, or did not end in time; the last lines it printed."""


def run(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> None:
    """Run ``command`` to its end."""
    with start(command, env={**os.environ, **env}, stdout=PIPE, stderr=STDOUT, new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except TimeoutExpired:
            end(process, patience_s=0)
            raise Failed(f"did not end in {timeout_s:.0f} s") from None
    if process.returncode != 0:
        lines = [line.strip() for line in out.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line or line.startswith("matmul:")] or lines
        raise Failed((errors or [f"ended with {process.returncode}"])[0][:300])


GREETING_S = 25.0
ANSWER_S = 15.0
STREAM_S = 0.3
ALL_PAIRS = 16
"""With more nodes, each node streams to this many others instead of all."""
Peers = dict[str, dict[str, Any]]
"""By host, the names, addresses and ports that its agent sent."""


def greet(all_agents: Sequence[Agent], nodes: Mapping[str, NodeMeasurements], *, suffix: str) -> Peers:
    """The agents that came, by host, with where they listen."""
    deadline = time.monotonic() + GREETING_S
    peers = {}
    for agent in all_agents:
        hello = agent.answer(deadline)
        node = nodes[agent.host]
        if hello is None:
            why = f" ({agent.complaint})" if agent.complaint else ""
            node.failures.append(f"did not answer within {GREETING_S:g} s{why}")
        elif "problem" in hello:
            node.failures.append(hello["problem"])
        else:
            node.address = hello.get("address")
            peers[agent.host] = hello | {"host": agent.host, "name": agent.host + suffix}
    return peers


def measure_latency(present: Sequence[Agent], nodes: Mapping[str, NodeMeasurements], peers: Peers) -> None:
    """Who cannot reach, or be reached by, more than half of the others is at fault; one pair alone is both's."""
    for agent in present:
        others = [peer for host, peer in peers.items() if host != agent.host]
        agent.ask(do="reach", me=peers[agent.host], peers=others)
    deadline = time.monotonic() + ANSWER_S
    broken: dict[str, dict[str, str]] = {host: {} for host in peers}
    latencies: dict[str, list[float]] = {host: [] for host in peers}
    for agent in present:
        for other, result in (agent.answer(deadline) or {}).items():
            if "problem" in result:
                broken[agent.host][other] = f"does not reach {other}: {result['problem']}"
                broken[other].setdefault(agent.host, f"{agent.host} does not reach it: {result['problem']}")
            else:
                latencies[agent.host].append(result["latency_s"])
    for host, problems in broken.items():
        if 2 * len(problems) > len(peers) - 1:
            nodes[host].failures.extend(list(problems.values())[:3])
        elif latencies[host]:
            nodes[host].values["latency_s"] = sorted(latencies[host])[len(latencies[host]) // 2]


def pair_hosts(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Pairs by rounds, each host in one pair of a round, as in a tournament: all pairs once, if they are few."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    for _ in range(min(len(ring) - 1, ALL_PAIRS)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure_network(
    sound: Sequence[Agent], nodes: Mapping[str, NodeMeasurements], peers: Peers, *, until: float
) -> None:
    """A node has the rate of its best pair, in the slower direction: a slow peer is not its fault."""
    by_host = {agent.host: agent for agent in sound}
    for pairs in pair_hosts(list(by_host)):
        if time.monotonic() > until:
            return
        rates: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
        for forth in (True, False):
            ways = {pair: pair if forth else pair[::-1] for pair in pairs}
            for sender, receiver in ways.values():
                by_host[sender].ask(do="stream", me=peers[sender], peer=peers[receiver], seconds=STREAM_S)
            deadline = time.monotonic() + ANSWER_S
            for pair, (sender, _) in ways.items():
                result = by_host[sender].answer(deadline) or {}
                rates[pair].append(result.get("bytes_per_s", 0.0))
        for ends, both_ways in rates.items():
            for host in ends:
                nodes[host].keep_best("network_bytes_per_s", min(both_ways))


def measure_memory(present: Sequence[Agent], nodes: Mapping[str, NodeMeasurements]) -> None:
    for agent in present:
        agent.ask(do="memory")
    deadline = time.monotonic() + ANSWER_S
    for agent in present:
        result = agent.answer(deadline)
        if result is None:
            nodes[agent.host].failures.append("stopped answering")
        else:
            nodes[agent.host].keep_best("memory_bytes_per_s", result["bytes_per_s"])


WRONG = "computes wrongly"
"""Message of the CUDA and MPI program about a node with wrong products."""


def measure_products(
    place: HostGroup, sound: Sequence[NodeMeasurements], findings: Findings, folder: Path, *, quick: bool, until: float
) -> None:
    """The CUDA and MPI program over all nodes: a rate for each of them, and MPI's all-reduce."""
    hosts = [node.host for node in sound]
    json_file = folder / "matmul.json"
    options = ["--size", "512", "--matrices", "random", "--iterations", "200", "--json", str(json_file)]
    options += [] if quick or len(hosts) == 1 else ["--sweep", "64M"]
    command = place.module(hosts, "hpcjobs.fabric.matmul", *options, mpi=place.mpi)
    try:
        run(command, env=place.world(hosts), timeout_s=min(60.0, max(1.0, until - time.monotonic())))
    except Failed as error:
        wrong = [node for node in sound if f" on {_short(node.host)}: {WRONG}" in str(error)]
        for node in wrong:
            node.failures.append(str(error))
        if not wrong:
            findings.notes.append(f"products not measured: {error}")
        return
    figures = json.loads(json_file.read_text(encoding="utf-8"))
    gflops = {_short(rank["host"]): rank["gflops"] for rank in figures["ranks"]}
    for node in sound:
        node.keep_best("flops", gflops[_short(node.host)] * 1e9)
    if figures["allreduce"]:
        findings.allreduce["MPI"] = convert(figures["allreduce"], AllReduce)


def requests_gpus(environ: Mapping[str, str]) -> bool:
    """Whether this job has GPUs; outside of Slurm, whether this machine shows some to it."""
    if "SLURM_JOB_ID" in environ:
        return environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0") or bool(environ.get("SLURM_JOB_GPUS"))
    drivers = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
    return environ.get("CUDA_VISIBLE_DEVICES") != "" and any(path.exists() for path in drivers)


def measure_gpus(
    place: HostGroup,
    sound: Sequence[NodeMeasurements],
    findings: Findings,
    folder: Path,
    *,
    quick: bool,
    tolerance: float,
    until: float,
) -> None:
    """Measure every GPU by one process each; a missing, broken, slow or wrong GPU is a failure of its node."""
    json_file = folder / "gpus.json"
    options = ["--json", str(json_file), *(["--no-collectives"] if quick else [])]
    left = list(sound)
    while left:
        hosts = [node.host for node in left]
        # Ranks of torch meet by MASTER_ADDR; a broken PMI of srun must not look like a broken GPU.
        command = place.module(hosts, "hpcjobs.trainers.measure", *options, mpi="none")
        try:
            run(command, env=place.world(hosts), timeout_s=min(60.0, max(1.0, until - time.monotonic())))
            break
        except Failed as error:
            bad = next((node for node in left if _names_fault(str(error), node.host)), None)
            if bad is None:
                findings.notes.append(f"GPUs not measured: {error}")
                return
            bad.failures.append(str(error))
            left.remove(bad)
    else:
        return  # each node has failed
    figures = json.loads(json_file.read_text(encoding="utf-8"))
    findings.gpus.extend(convert(figures["gpus"], list[GpuReport]))
    findings.allreduce.update(convert(figures["allreduce"], dict[str, AllReduce]))
    problems = judge_gpus(findings.gpus, tolerance=tolerance)
    for node in left:
        node.failures.extend(problems.get(node.host, []))


def _names_fault(message: str, host: str) -> bool:
    """Whether the program that measures GPUs reports one that is missing or broken on this node."""
    kind = gpu_errors.classify(message)
    is_fault = "GPUs are visible" in message or (kind is not None and kind.effect == gpu_errors.FAULT)
    return is_fault and re.search(rf" on {re.escape(_short(host))}[.:]", message) is not None


def _short(host: str) -> str:
    """MPI may know a host by its full name."""
    return host.partition(".")[0]


def measure_allreduce(
    place: HostGroup, sound: Sequence[NodeMeasurements], findings: Findings, folder: Path, *, until: float
) -> None:
    """All-reduce as trainers do it, by torch and by Horovod, which share the time that is left."""
    hosts = [node.host for node in sound]
    there = [(over, package) for over, package in (("group", "torch"), ("horovod", "horovod")) if find_spec(package)]
    findings.notes.extend(
        f"all-reduce of {package} not measured: it is not installed"
        for package in ("torch", "horovod")
        if package not in dict(there).values()
    )
    for index, (over, package) in enumerate(there):
        json_file = folder / f"allreduce-{over}.json"
        arguments = ("--over", over, "--most", "16M", "--json", str(json_file))
        command = place.module(hosts, "hpcjobs.trainers.measure", *arguments, mpi=place.mpi)
        share_s = max(1.0, (until - time.monotonic()) / (len(there) - index))
        try:
            run(command, env=place.world(hosts), timeout_s=share_s)
        except Failed as error:
            findings.notes.append(f"all-reduce of {package} over {len(hosts)} nodes not measured: {error}")
        else:
            figures = json.loads(json_file.read_text(encoding="utf-8"))
            findings.allreduce[figures["over"]] = convert(figures["allreduce"], AllReduce)


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
    hosts = tuple(read_hosts(listed)) if listed else (socket.gethostname(),)
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
