"""Lets all ranks meet at one store before any collective, and names the absent ranks after a deadline."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import AlreadyReported, RendezvousError, TrainerError, WorldMismatch
from hpcjobs.runtime.hostlist import hosts_of

PORT_RETRY_S = 0.2
VERDICT_GRACE_S = 10.0  # rank 0 starts its wait later than the others, by at most this


def open_store(env: DistEnv, timeout_s: float) -> Store:
    """Return the key-value store of this launch, hosted by rank 0 or by torchrun's agent.

    An agent's store outlives its ranks: each start uses a separate prefix, with the agent's count of restarts.
    """
    if env.master_port is None:
        return HashStore()
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosting = env.rank == 0 and not of_agent
    try:
        if not hosting:
            _await_port(env.master_addr, env.master_port, timeout_s)
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=hosting,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _unreachable(env, error, timeout_s, hosting=hosting) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    return PrefixStore(f"hpcjobs/{attempt}", store)


def _await_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 listens; after `timeout_s`, raise the last OSError of the connection."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError:  # noqa: PERF203
            if time.monotonic() > deadline:
                raise
            time.sleep(PORT_RETRY_S)


def _unreachable(env: DistEnv, cause: Exception, timeout_s: float, *, hosting: bool) -> TrainerError:
    who, where = f"rank {env.rank} on {socket.gethostname()}", f"{env.master_addr}:{env.master_port}"
    if hosting:
        error = RendezvousError(f"{who} could not open {where}", hint="is the port taken? choose another MASTER_PORT")
    else:
        error = RendezvousError(
            f"{who} did not reach rank 0 at {where} within {timeout_s:g} s ({cause})",
            hint="does that name resolve here, and may hosts connect to each other?",
        )
    error.elected = True  # without a store no other rank can be asked
    return error


def roll_call(env: DistEnv, store: Store, timeout_s: float) -> tuple[str, ...]:
    """The hosts by rank, once rank 0 has checked that this is the requested world."""
    _claim_rank(env, store)
    if env.rank != 0:
        return _await_verdict(env, store, timeout_s)
    try:
        hosts = _judge(env, store, timeout_s)
    except TrainerError as error:
        store.set("verdict", json.dumps({"code": int(error.code), "message": str(error)}))
        raise
    store.set("verdict", json.dumps({"hosts": hosts}))
    return tuple(hosts)


def _claim_rank(env: DistEnv, store: Store) -> None:
    host = socket.gethostname()
    node = os.environ.get("SLURMD_NODENAME") or host
    claims = store.add(f"claims/{env.rank}", 1)
    if claims > 1:
        error = WorldMismatch(
            f"{claims} processes call themselves rank {env.rank}; one is on {host}",
            hint="RANK must be set per task, not exported once for all",
        )
        error.elected = True
        raise error
    store.set(f"here/{env.rank}", json.dumps([host, node]))


def _await_verdict(env: DistEnv, store: Store, timeout_s: float) -> tuple[str, ...]:
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_s + VERDICT_GRACE_S))
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {env.rank} on {socket.gethostname()} reached {env.master_addr}:{env.master_port}, "
            "but rank 0 never answered"
        ) from error
    verdict = json.loads(store.get("verdict"))
    if "code" in verdict:
        raise AlreadyReported(verdict["code"], verdict["message"])
    return tuple(verdict["hosts"])


def _judge(env: DistEnv, store: Store, timeout_s: float) -> list[str]:
    keys = [f"here/{rank}" for rank in range(env.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError:
        arrived = [rank for rank, key in enumerate(keys) if store.check([key])]
        names = node_names(store, [keys[rank] for rank in arrived])
        raise _absent(env, dict(zip(arrived, names, strict=True)), timeout_s) from None
    hosts = node_names(store, keys)
    requested = os.environ.get("HPCJOBS_NNODES")
    if requested is not None and len(set(hosts)) < int(requested):
        raise WorldMismatch(
            f"the job asked for {requested} nodes (HPCJOBS_NNODES), but its {env.world_size} ranks run on "
            f"{len(set(hosts))}: {_tally(hosts)}",
            hint="is --ntasks-per-node larger than requested, or has a node dropped out?",
        )
    return hosts


def node_names(store: Store, keys: list[str]) -> list[str]:
    """The hosts of the ranks that wrote ``keys``, by Slurm's names of its nodes where they are known.

    Slurm knows a node by its NodeName alone, which need not be its hostname. A launcher that sends the environment
    of the first node to all others makes one name of several hosts: hostnames are used then.
    """
    claims = [json.loads(store.get(key)) for key in keys]
    hosts, nodes = [host for host, _ in claims], [node for _, node in claims]
    return nodes if len(set(nodes)) >= len(set(hosts)) else hosts


def _absent(env: DistEnv, here: dict[int, str], timeout_s: float) -> RendezvousError:
    missing = [str(rank) for rank in range(env.world_size) if rank not in here]
    return RendezvousError(
        f"{len(missing)} of {env.world_size} ranks did not arrive at {env.master_addr}:{env.master_port} "
        f"within {timeout_s:g} s: rank {', '.join(missing)}; arrived: {_tally(list(here.values()))}"
        f"{_silent_nodes(here.values())}",
        hint="look at the other nodes' logs; --rendezvous-timeout-s waits longer",
    )


def _silent_nodes(here: Iterable[str]) -> str:
    """Name the nodes of SLURM_JOB_NODELIST without a rank; empty if every node has one, or no node has."""
    nodes = hosts_of(os.environ.get("SLURM_JOB_NODELIST", ""))
    arrived = {host.partition(".")[0] for host in here}
    silent = [node for node in nodes if node.partition(".")[0] not in arrived]
    return f"; nobody from {', '.join(silent)}" if silent and len(silent) < len(nodes) else ""


def _tally(hosts: list[str]) -> str:
    return ", ".join(f"{host} ({count} ranks)" for host, count in Counter(hosts).items())
