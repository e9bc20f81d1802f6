"""Horovod started on ranks that have met already: over MPI or Gloo, and never as worlds of one.

Open MPI and MPICH learn their peers from the launcher. If the launcher does not support them, each rank becomes a
separate world and trains alone, and the result looks like success. So `start` checks beforehand that the launcher
supports this MPI, and afterwards that all ranks are one world.

Under Gloo, rank 0 keeps the addresses until all ranks have them. horovodrun does so for processes it starts by ssh.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module

from torch import nn

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import RendezvousError, UsageError, WorldMismatch
from hpcjobs.trainers.distributed.mpi import SPEAKS, describe_launcher, launcher_supports, shorten_version
from hpcjobs.trainers.distributed.rendezvous import open_store, roll_call

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
    """Inside, `hvd.init` finds the ranks of `hosts`; a rendezvous that the environment names is used instead."""
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
    """Return each rank's slot: its number on its host, and the host's number among all hosts with this local rank."""
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


START_TIMEOUT_S = 55.0
WANTS = {"Open MPI": "pmix", "MPICH": "pmi2"}


def start(
    env: DistEnv, hosts: Sequence[str], *, controller: str, share: Callable[[str], str], log: Callable[[str], None]
) -> str:
    """Start Horovod on the ranks of `hosts`; gives "horovod-mpi" or "horovod-gloo".

    `share` gives rank 0's text to every rank. Horovod's variables of a job script or horovodrun are used.

    Raises:
        WorldMismatch: the ranks would not be, or are not, the one world of `env`.
        RendezvousError: they did not come together in time.
    """
    if hvd.is_initialized():  # by the run before in this process
        over, why = "mpi" if hvd.mpi_enabled() else "gloo", ""
        _refuse_other_world(env, hosts, over)
        return f"horovod-{over}"
    over, why = _choose_controller(controller, env)
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = over
    with meet_over_gloo(env, hosts, share) if over == "gloo" else nullcontext():
        _init(over)
    _refuse_other_world(env, hosts, over)
    log(f"Horovod: {hvd.size()} ranks over {'Gloo' if over == 'gloo' else mpi_library()}{why}")
    return f"horovod-{over}"


def _choose_controller(requested: str, env: DistEnv) -> tuple[str, str]:
    """Return the controller, "mpi" or "gloo", and a note why MPI was not chosen, if `requested` allows both."""
    controller = os.environ.get("HOROVOD_CONTROLLER") if requested == "auto" else requested
    if env.world_size == 1:
        return "gloo", ""
    if controller == "gloo":
        return "gloo", ""
    if not hvd.mpi_built():
        return "gloo", " (Horovod was built without MPI)"
    family = mpi_library().split(",")[0]
    if launcher_supports(family, env.rank):
        return "mpi", ""
    if controller is None:
        return "gloo", f" ({describe_launcher()} does not speak to {family})"
    raise _launcher_error(env, family)


def _launcher_error(env: DistEnv, family: str) -> WorldMismatch:
    name = family.split(" v")[0]
    return WorldMismatch(
        f"{describe_launcher()} does not speak to {family} (no rank in {' or '.join(SPEAKS.get(name, ()))}), so each "
        f"of the {env.world_size} ranks would be a world of its own",
        hint=f"mpi: {WANTS.get(name, 'pmix')} in the site file, --launcher mpirun, or --controller gloo",
    )


def mpi_library() -> str:
    """Name and version of the MPI that Horovod was linked to, such as `Open MPI v4.1.4`."""
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(import_module("horovod.torch.mpi_lib_v2").__file__).MPI_Get_library_version(text, ctypes.byref(length))
    return shorten_version(text.value.decode(errors="replace"))


def _init(over: str) -> None:
    """Run `hvd.init` with a time limit: a rank that MPI or Gloo loses on the way would wait for ever."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            hvd.init()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="horovod-init", daemon=True)
    thread.start()
    thread.join(START_TIMEOUT_S)
    if thread.is_alive() or failures:
        atexit.unregister(hvd.shutdown)  # it would wait for a Horovod that never started
        cause = failures[0] if failures else f"nothing happened for {START_TIMEOUT_S:g} s"
        raise RendezvousError(
            f"Horovod did not start over {over} on {socket.gethostname()} (by {describe_launcher()}): {cause}",
            hint="may the nodes connect to each other on any port? `interface` in the site file names the network",
        )


def _refuse_other_world(env: DistEnv, hosts: Sequence[str], over: str) -> None:
    if (hvd.rank(), hvd.size()) == (env.rank, env.world_size):
        return
    here = hvd.allgather_object(hosts[env.rank]) if hvd.size() > 1 else [hosts[env.rank]]
    missing = [host for host in dict.fromkeys(hosts) if host not in here]
    raise WorldMismatch(
        f"Horovod's world has {hvd.size()} of {env.world_size} ranks (rank {env.rank} is its rank {hvd.rank()}), "
        f"started by {describe_launcher()} over {mpi_library() if over == 'mpi' else over}"
        + (f"; without {', '.join(missing)}" if missing else ""),
        hint="the site's `mpi` must be a type this MPI was built with; --launcher mpirun and horovod-gloo need none",
    )


def start_alone(env: DistEnv, *, controller: str, timeout_s: float) -> str:
    """Start Horovod where no launcher has gathered the ranks: they meet at a store first, and are counted there."""
    if env.world_size == 1 or hvd.is_initialized():
        return start(env, ("localhost",) * env.world_size, controller=controller, share=str, log=_silence)
    store = open_store(env, timeout_s)
    hosts = roll_call(env, store, timeout_s)

    def share(text: str) -> str:
        if env.rank == 0:
            store.set("horovod", text)
        return store.get("horovod").decode()

    backend = start(env, hosts, controller=controller, share=share, log=_silence)
    hvd.barrier()  # rank 0 keeps the store until all have read it
    return backend


def make_contiguous(model: nn.Module) -> None:
    """Give weights torch's usual layout, the only one that Horovod sends; gradients follow their weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()


def _silence(text: str) -> None:
    """Discard log lines: Lightning does the logging."""
