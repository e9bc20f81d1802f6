"""Horovod's Gloo controller under any launcher: rank 0 keeps the addresses until all ranks have them.

horovodrun does the same for processes it starts by ssh; here they run already.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import UsageError

try:
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
except ImportError as missing:
    raise UsageError(
        f"Horovod is not in {sys.executable}: {missing}", hint="make horovod, or containers/install_horovod.sh PYTHON"
    ) from missing

__all__ = ["ADDRESS", "PORT", "hvd", "meet_over_gloo", "slots_of"]

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


@contextmanager
def meet_over_gloo(env: DistEnv, hosts: Sequence[str], share: Callable[[str], str]) -> Iterator[None]:
    """Inside, `hvd.init` finds the ranks of `hosts`; a rendezvous that somebody else keeps is used as it is."""
    if ADDRESS in os.environ or env.world_size == 1:
        yield
        return
    slots = slots_of(hosts)
    with _serve(slots) if env.rank == 0 else nullcontext(0) as port:
        os.environ.update(_publish(slots[env.rank], env, share(str(port))))
        interface = os.environ.get("HPCJOBS_IFNAME", "lo" if len(set(hosts)) == 1 else None)
        if interface is not None:
            os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)
        yield


@contextmanager
def _serve(slots: list[SlotInfo]) -> Iterator[int]:
    """The port of a rendezvous kept by a thread of this process."""
    with RendezvousHTTPServer(("", 0), RendezvousHandler, False) as server:
        server.init(slots)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def slots_of(hosts: Sequence[str]) -> list[SlotInfo]:
    """Each rank's place as Horovod counts it: on its host, and among those with its number on other hosts."""
    slots = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        across = [other for other in dict.fromkeys(hosts) if hosts.count(other) > local_rank]
        slots.append(
            SlotInfo(
                hostname=host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=across.index(host),
                size=len(hosts),
                local_size=hosts.count(host),
                cross_size=len(across),
            )
        )
    return slots


def _publish(slot: SlotInfo, env: DistEnv, port: str) -> dict[str, str]:
    return {
        ADDRESS: env.master_addr,
        PORT: port,
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }
