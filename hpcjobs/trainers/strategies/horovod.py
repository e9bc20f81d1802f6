"""Horovod's DistributedOptimizer behind the strategy's verbs, on ranks that have met already.

Horovod is started over MPI or Gloo, and never as worlds of one. Open MPI and MPICH learn their peers from the launcher.
If the launcher does not support them, each rank becomes a separate world and trains alone, and the result looks like
success. So `start` checks beforehand that the launcher supports this MPI, and afterwards that all ranks are one world.

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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import RendezvousError, UsageError, WorldMismatch
from hpcjobs.trainers.distributed import (
    SPEAKS,
    RankGroup,
    describe_launcher,
    launcher_supports,
    open_store,
    roll_call,
    shorten_version,
)
from hpcjobs.trainers.horovod import HorovodFlags
from hpcjobs.trainers.strategies import Strategy, Traffic
from hpcjobs.trainers.workloads.base import Workload

try:
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
except ImportError as missing:
    raise UsageError(
        f"Horovod is not in {sys.executable}: {missing}", hint="make horovod, or containers/install_horovod.sh PYTHON"
    ) from missing

__all__ = ["Horovod", "hvd"]

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
    names = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    own = {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in names}
    return {ADDRESS: env.master_addr, PORT: port, **own}


START_TIMEOUT_S = 55.0
WANTS = {"Open MPI": "pmix", "MPICH": "pmi2"}


def start(
    env: DistEnv,
    hosts: Sequence[str],
    *,
    controller: str,
    share: Callable[[str], str],
    log: Callable[[str], None] = lambda text: None,
) -> str:
    """Start Horovod on the ranks of `hosts`; gives "horovod-mpi" or "horovod-gloo".

    `share` gives rank 0's text to every rank. Horovod's variables of a job script or horovodrun are used.

    Raises WorldMismatch: the ranks would not be, or are not, the one world of `env`. RendezvousError: they did not come
    together in time.
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
    if env.world_size == 1 or controller == "gloo":
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
        return start(env, ("localhost",) * env.world_size, controller=controller, share=str)
    store = open_store(env, timeout_s)
    hosts = roll_call(env, store, timeout_s)

    def share(text: str) -> str:
        if env.rank == 0:
            store.set("horovod", text)
        return store.get("horovod").decode()

    backend = start(env, hosts, controller=controller, share=share)
    hvd.barrier()  # rank 0 keeps the store until all have read it
    return backend


def make_contiguous(model: nn.Module) -> None:
    """Give weights torch's usual layout, the only one that Horovod sends; gradients follow their weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()


class Horovod(Strategy):
    """Data parallelism by Horovod: its optimizer averages the gradients."""

    name = "horovod"

    def __init__(self, flags: HorovodFlags) -> None:
        self.flags = flags
        self.quiet_passes = not (flags.adasum or flags.join)
        self.fills = not flags.join
        self.distributed: Any = None  # Horovod's optimizer: it hooks the gradients

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Start Horovod on the ranks that have met, and send rank 0's weights to all."""
        self._refuse_adasum_with(dtype, group)
        _export_setting("HOROVOD_FUSION_THRESHOLD", self.flags.fusion_threshold_mb, unit=1 << 20)
        _export_setting("HOROVOD_CYCLE_TIME", self.flags.cycle_time_ms)
        self.backend = start(
            group.env, group.hosts, controller=self.flags.controller, share=group.from_first, log=group.log
        )
        if self.flags.adasum and self.backend != "horovod-mpi":
            raise UsageError("--adasum works over MPI alone", hint="--launcher mpirun, or a site with mpi: pmix")
        make_contiguous(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model

    def _refuse_adasum_with(self, dtype: torch.dtype | None, group: RankGroup) -> None:
        if self.flags.adasum and dtype is torch.float16:
            raise UsageError("--adasum steps before a loss scale could be taken back", hint="--precision bf16")
        if self.flags.adasum and self.flags.join:
            raise UsageError("--adasum weighs the steps of all ranks: there is no --join with it")
        if self.flags.adasum and group.world_size & (group.world_size - 1):
            raise UsageError(f"--adasum needs 2, 4, 8, … ranks, not {group.world_size}")

    def optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        self.distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if self.flags.compress == "fp16" else hvd.Compression.none,
            op=hvd.Adasum if self.flags.adasum else hvd.Average,
        )
        wrapped: torch.optim.Optimizer = self.distributed
        return wrapped

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Raise Horovod's passes per step to two, which one pass does not reach, so gradients add up."""
        before = self.distributed.backward_passes_per_step
        self.distributed.set_backward_passes_per_step(2)
        try:
            yield
        finally:
            self.distributed.set_backward_passes_per_step(before)

    def after_backward(self, model: nn.Module) -> None:
        self.distributed.synchronize()

    def stepping(self) -> AbstractContextManager[None]:
        """Gradients are averaged already, before they were clipped."""
        if self._adasum_steps:
            return nullcontext()
        quiet: AbstractContextManager[None] = self.distributed.skip_synchronize()
        return quiet

    @property
    def _adasum_steps(self) -> bool:
        return self.flags.adasum and int(hvd.size()) > 1

    def join(self, model: nn.Module, loss: torch.Tensor | None) -> torch.Tensor:
        """Add zeros to the gradients of the other ranks until all are here; then take their weights over.
        The one that joins last has made every step."""
        last = hvd.join()
        hvd.broadcast_optimizer_state(self.distributed, root_rank=last)
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        mine = torch.zeros(2) if loss is None else torch.stack([loss.detach().cpu(), torch.ones(())])
        total, ranks = hvd.allreduce(mine, op=hvd.Sum, name="loss of the last step").unbind()
        mean: torch.Tensor = total / ranks
        return mean

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        torch.optim.Optimizer.zero_grad(optimizer)  # Horovod's own refuses gradients that were never sent

    def clip(self, parameters: Any, max_norm: float) -> torch.Tensor:
        if self._adasum_steps:
            raise UsageError("--adasum steps while gradients still arrive: there is nothing to clip with --clip-norm")
        return super().clip(parameters, max_norm)

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load the state, and send rank 0's state and weights to all. To send an empty state would make a step."""
        optimizer.load_state_dict(state)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if optimizer.state:
            for values in optimizer.state.values():  # of a trainer with another layout
                values.update({name: v.contiguous() for name, v in values.items() if isinstance(v, torch.Tensor)})
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def traffic(self, model: nn.Module) -> Traffic | None:
        """Fusion is decided as gradients arrive, so the number of calls is not known."""
        width = 2 if self.flags.compress == "fp16" else 4
        return Traffic(bytes=width * sum(p.numel() for p in model.parameters() if p.requires_grad), calls=None)


def _export_setting(name: str, value: float | None, *, unit: int | None = None) -> None:
    """A setting that Horovod reads from the environment when it starts."""
    if value is not None:
        os.environ[name] = str(value) if unit is None else str(int(value * unit))
