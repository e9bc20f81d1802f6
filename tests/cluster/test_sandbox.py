"""The sandbox as a user of Slurm sees it, and as the machine does after it is gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from commandline import hpcjobs
from shape import SHAPE
from typer.testing import CliRunner
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.cli.rehearse import sandbox_app
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.processes.programs import Result, run
from hpcjobs.processes.tree import identity
from hpcjobs.sandbox import Sandbox, Shape, network, services
from hpcjobs.sandbox.folder import Folder, folder_at
from hpcjobs.sandbox.network import HOSTS_FILE, bridge_owner
from hpcjobs.sandbox.sandbox import leftovers
from hpcjobs.site.library import load_site

Slurm = Callable[..., Result]

MPI_PROGRAM = """\
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, size, sum, length;
    char host[MPI_MAX_PROCESSOR_NAME];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &length);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("%d %d %d %s\\n", rank, size, sum, host);
    MPI_Finalize();
    return 0;
}
"""
LOOK_UP = """\
import socket, time
start = time.monotonic()
names = [socket.getnameinfo((f"{prefix}10.78.0.{n}", 1), 0)[0] for n in (11, 12, 13, 14) for prefix in ("", "::ffff:")]
print(*names, time.monotonic() - start)
"""


@pytest.fixture
def slurm(sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Slurm's commands as after ``eval "$(hpcjobs sandbox env)"``."""
    for name, value in sandboxes.environment().items():
        monkeypatch.setenv(name, value)

    def command(*argv: str) -> Result:
        return run(argv)

    return command


def lines(result: Result) -> list[str]:
    """Standard output of a command that went well, sorted: tasks print in any order."""
    assert result.code == 0, result.err
    return sorted(result.out.splitlines())


def test_every_host_has_its_own_name_and_address(slurm: Slurm) -> None:
    """Four hosts, four names, four addresses on eth0."""
    printed_lines = lines(
        slurm("srun", "-N4", "sh", "-c", "echo $(hostname) $(ip -4 -o address show eth0 | cut -d' ' -f7)")
    )
    assert printed_lines == [f"tu0{n} 10.78.0.1{n}/24" for n in (1, 2, 3, 4)]


def test_a_user_who_is_added_may_submit_and_one_whom_the_machine_does_not_know_is_refused(slurm: Slurm) -> None:
    """`uucp` is on every Debian, and no other test gives it an account."""
    as_uucp = ("runuser", "-u", "uucp", "--", "srun", "--chdir=/", "-N1", "id", "-un")
    assert "Invalid account" in slurm(*as_uucp).err
    assert hpcjobs("sandbox", "add-user", "uucp").code == 0
    assert hpcjobs("sandbox", "add-user", "uucp").code == 0
    assert lines(slurm(*as_uucp)) == ["uucp"]
    unknown = hpcjobs("sandbox", "add-user", "nobody-of-that-name")
    assert (unknown.code, "has no user" in unknown.err) == (5, True)


def test_hosts_know_each_others_link_address_so_that_many_do_not_fill_the_kernels_table(slurm: Slurm) -> None:
    printed_lines = lines(
        slurm("srun", "-N1", "-w", "tu02", "ip", "neighbour", "show", "dev", "eth0", "nud", "permanent")
    )
    assert [line.split()[0] for line in printed_lines] == ["10.78.0.1", "10.78.0.11", "10.78.0.13", "10.78.0.14"]


@pytest.mark.skipif(not network.freezer_available(), reason="no cgroup freezer of version 1 on this machine")
def test_the_groups_of_a_sandboxs_steps_are_in_one_of_its_own(slurm: Slurm, workdir: Path) -> None:
    """Hosts of two sandboxes may have one name: in one tree each would freeze and end the other's steps."""
    with subprocess.Popen(["srun", "-N1", "-w", "tu01", "sh", "-c", "touch here; exec sleep 1234.5"]) as step:
        eventually((workdir / "here").exists)
        slept = [path for path in Path("/proc").glob("[0-9]*") if b"1234.5" in read_bytes(path / "cmdline")]
        trees = {line for path in slept for line in (path / "cgroup").read_text().splitlines() if "slurm_tu01" in line}
        step.terminate()
    assert len(trees) == 1
    assert re.search(r"freezer:.*/hpcjobs-[0-9a-f]{8}/slurm_tu01/uid_0/job_\d+/step_0", trees.pop())


def read_bytes(path: Path) -> bytes:
    """What a file of a process says; nothing once the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_every_host_has_its_own_tmp_and_shared_memory(slurm: Slurm, workdir: Path) -> None:
    """What one host writes there no other sees, nor this machine; the work folder all see."""
    script = 'for d in /tmp /var/tmp /dev/shm "$PWD"; do touch "$d/mark-$(hostname)"; done; sleep 0.5; '
    script += "echo $(ls -d /tmp/mark-* /var/tmp/mark-* /dev/shm/mark-*)"
    printed_lines = lines(slurm("srun", "-N3", "sh", "-c", script))
    marks = sorted(path.name for path in workdir.glob("mark-tu0*"))
    assert len(marks) == 3
    assert printed_lines == [f"/dev/shm/{mark} /tmp/{mark} /var/tmp/{mark}" for mark in marks]
    assert not [mark for mark in marks if Path("/tmp", mark).exists()]


def test_addresses_resolve_both_ways_and_at_once(slurm: Slurm) -> None:
    """In both spellings: torch.distributed looks up the mapped one, for ten seconds if nobody answers."""
    (printed_lines,) = lines(slurm("srun", "-N1", sys.executable, "-c", LOOK_UP))
    *names, elapsed_s = printed_lines.split()
    assert names == [f"tu0{n}" for n in (1, 2, 3, 4) for _ in range(2)]
    assert float(elapsed_s) < 9
    assert socket.gethostbyname("tu03") == "10.78.0.13"


def test_a_program_on_one_host_reaches_another_by_name(slurm: Slurm) -> None:
    """Over the bridge, with a port that only that host has."""
    server = (
        "import socket; s=socket.create_server(('', 29999)); c=s.accept()[0]; c.sendall(socket.gethostname().encode())"
    )
    client = (
        "import socket, time\n"
        "for _ in range(100):\n"
        "    try: c = socket.create_connection(('tu01', 29999)); break\n"
        "    except ConnectionRefusedError: time.sleep(0.1)\n"
        "print(socket.gethostname(), 'heard', c.recv(9).decode())"
    )
    both = f'if [ "$(hostname)" = tu01 ]; then exec {sys.executable} -c "$1"; else exec {sys.executable} -c "$2"; fi'
    printed_lines = lines(slurm("srun", "-N2", "-w", "tu01,tu02", "sh", "-c", both, "sh", server, client))
    assert printed_lines == ["tu02 heard tu01"]


# On a busy machine a rank of Open MPI may get a message before MPI_Init has made its communicator
# (open-mpi/ompi, issues 11438 and 12495). No other end is forgiven.
CRASH_OF_OPEN_MPI = "Segmentation fault"


@pytest.mark.skipif(shutil.which("mpicc") is None, reason="mpicc is missing: apt-get install libopenmpi-dev")
def test_an_mpi_program_runs_over_four_hosts_by_pmix(
    slurm: Slurm, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks in one world, an allreduce across the bridge."""
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    (workdir / "ring.c").write_text(MPI_PROGRAM)
    assert run(["mpicc", "-o", "ring", "ring.c"]).code == 0
    monkeypatch.setenv("SLURM_MPI_TYPE", "none")  # must not be what decides
    for _ in range(3):
        result = slurm("srun", "-N4", "--ntasks-per-node=2", "--mpi=pmix", "./ring")
        if CRASH_OF_OPEN_MPI not in result.err:
            break
    assert lines(result) == [f"{rank} 8 28 tu0{rank // 2 + 1}" for rank in range(8)]


def test_pmi2_tells_eight_tasks_who_they_are(slurm: Slurm) -> None:
    """What MPICH's programs read."""
    printed_lines = lines(
        slurm("srun", "-N4", "-n8", "--mpi=pmi2", "sh", "-c", "echo $PMI_RANK $PMI_SIZE ${PMI_FD:+fd}")
    )
    assert printed_lines == [f"{rank} 8 fd" for rank in range(8)]


def test_tasks_that_wait_give_this_machines_cores_to_others_unless_told_otherwise(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ("srun", "-N2", "sh", "-c", "echo $OMP_WAIT_POLICY $OMPI_MCA_mpi_yield_when_idle")
    assert lines(slurm(*show)) == ["passive 1"] * 2
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert lines(slurm(*show)) == ["active 1"] * 2


def test_sacct_has_the_job_with_its_account_and_memory(slurm: Slurm) -> None:
    """From slurmdbd: state, QOS, account, and what the step used."""
    code = "x = bytearray(50 << 20); import time; time.sleep(2.5)"
    job = lines(slurm("sbatch", "--parsable", "-o", "/dev/null", "--wrap", f"srun {sys.executable} -c '{code}'"))[0]
    columns = "--format=JobID,State,QOS,Account,MaxRSS"
    ask = ("sacct", "-j", job, "--parsable2", "--noheader", "--noconvert", "--units=M", columns)
    eventually(lambda: f"{job}|COMPLETED|normal|sandbox|" in slurm(*ask).out.splitlines())
    step = next(line for line in slurm(*ask).out.splitlines() if line.startswith(f"{job}.0|COMPLETED"))
    assert float(step.split("|")[-1].rstrip("M")) > 40


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-p", "short", "-t", "2:00:00"], "time limit"),
        (["-p", "compute", "-t", "3-0"], "time limit"),
        (["-p", "short", "-N3"], "Node count"),
        (["-N5"], "Node count"),
        (["-p", "long"], "qos"),
        (["-p", "long", "-q", "long", "-t", "8-0"], "time limit"),
        (["--mem=65G"], "Memory"),
        (["-N1", "--cpus-per-task=17"], "configuration"),
        (["--gpus-per-node=1"], "gres"),
        (["-A", "nobodys"], "account"),
        (["-p", "nowhere"], "partition"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_limits_of_the_site_refuse(slurm: Slurm, options: list[str], says: str) -> None:
    """At once, as root too, and with Slurm's own words."""
    refused = slurm("sbatch", *options, "--wrap=true")
    assert refused.code != 0
    assert says.lower() in refused.err.lower()


def test_a_qos_has_its_own_longest_time(slurm: Slurm) -> None:
    """The partition would allow it; the QOS refuses."""
    assert slurm("scontrol", "update", "partition=compute", "maxtime=UNLIMITED").code == 0
    try:
        assert "QOSMaxWallDurationPerJobLimit" in slurm("sbatch", "-t", "3-0", "--wrap=true").err
        assert slurm("sbatch", "-H", "-q", "long", "-t", "3-0", "--wrap=true").code == 0
    finally:
        slurm("scancel", "--user=root", "--state=PENDING")
        assert slurm("scontrol", "update", "partition=compute", "maxtime=2-00:00:00").code == 0


def test_jobs_start_within_seconds_and_an_array_of_a_thousand_is_taken(slurm: Slurm, workdir: Path) -> None:
    """MaxArraySize is 1001: the highest index is 1000."""
    assert slurm("sbatch", "-o", "/dev/null", "--wrap", "touch started").code == 0
    eventually(
        (workdir / "started").exists, timeout_s=50
    )  # Slurm looks at its queue every 60 s if nobody tells it more
    taken = slurm("sbatch", "--hold", "--array=0-1000", "--wrap=true")
    assert slurm("sbatch", "--array=0-1001", "--wrap=true").code != 0
    assert slurm("scancel", lines(taken)[0].split()[-1]).code == 0


def test_without_slurm_conf_nothing_is_the_sandboxs(sandbox: Sandbox, workdir: Path) -> None:
    """A Slurm that this machine has of its own goes on as before."""
    assert "tu01" not in run(["sinfo", "--noheader", "--Node"]).out


def test_the_site_is_played_by_the_sandbox(sandbox: Sandbox, workdir: Path) -> None:
    """``--site tu-hpc`` means this machine while it is up; other sites are as before."""
    site = load_site("tu-hpc")
    assert site.rehearsal
    assert site.slurm_conf == sandbox.slurm_conf
    assert {name: partition.nodes for name, partition in site.partitions.items()} == {
        "compute": 4,
        "short": 2,
        "long": 4,
        "scavenger": 4,
    }
    assert not load_site("gcp-t4").rehearsal


def test_status_and_env_say_what_is_up(sandbox: Sandbox, workdir: Path) -> None:
    """For people and for programs."""
    answer = CliRunner().invoke(sandbox_app, ["status", "--json"])
    document = json.loads(answer.stdout)
    assert (answer.exit_code, document["state"]) == (0, "up")
    assert sorted(document["nodes"]) == ["tu01", "tu02", "tu03", "tu04"]
    assert f"export SLURM_CONF={sandbox.slurm_conf}\n" in CliRunner().invoke(sandbox_app, ["env"]).stdout


def test_up_again_finds_it_up(sandbox: Sandbox, workdir: Path) -> None:
    """Harmless: nothing is started; what was not said is no difference."""
    daemons = {path.name: path.read_bytes() for path in Path(sandbox.root, "daemons").iterdir()}
    assert sandboxes.up(SHAPE) == sandbox
    assert sandboxes.up(Shape(like="tu-hpc")) == sandbox
    assert {path.name: path.read_bytes() for path in Path(sandbox.root, "daemons").iterdir()} == daemons


@pytest.mark.parametrize("shape", [Shape(like="tu-hpc", nodes=3), Shape(like="gcp-t4"), Shape()])
def test_another_shape_is_refused_while_it_is_up(sandbox: Sandbox, workdir: Path, shape: Shape) -> None:
    """The message says which one is up, and what to do."""
    with pytest.raises(RequestError, match=r"another shape is up: --like tu-hpc --nodes 4.*\nhint: .* down"):
        sandboxes.up(shape)


def test_a_second_sandbox_elsewhere_is_refused(sandbox: Sandbox, workdir: Path) -> None:
    """One bridge, one set of addresses; the other folder is not left behind."""
    other = workdir / "second"
    with pytest.raises(RequestError, match=f"a sandbox is up in {sandbox.root}"):
        sandboxes.up(SHAPE, root=other)
    assert not other.exists()
    sandboxes.down(root=other)
    assert sandboxes.status().state == "up"


def test_down_from_inside_a_job_is_refused(slurm: Slurm) -> None:
    """It would end itself half-way."""
    code = "from hpcjobs import sandbox; sandbox.down()"
    refused = slurm("srun", "-N1", sys.executable, "-c", code)
    assert refused.code != 0
    assert "runs on a host of the sandbox" in refused.err
    assert sandboxes.status().state == "up"


def pid_of(root: str, name: str) -> int:
    """Pid of a daemon, from its record."""
    return int(json.loads((Path(root) / "daemons" / f"{name}.json").read_bytes())["pid"])


def test_daemons_that_died_are_named_and_started_again_with_jobs_kept(slurm: Slurm, sandbox: Sandbox) -> None:
    """``up`` repairs: a job that was held before the crash can be released after it."""
    job = lines(slurm("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap=true"))[0]
    submitted = time.time()
    eventually(lambda: (Path(sandbox.root) / "ctld" / "job_state").stat().st_mtime > submitted)
    for name in ("slurmctld", "slurmdbd", "slurmd-tu02"):
        os.kill(pid_of(sandbox.root, name), signal.SIGKILL)
    eventually(lambda: len(sandboxes.status().problems) == 3)
    assert sandboxes.status().state == "damaged"
    assert sandboxes.up(SHAPE) == sandbox
    assert sandboxes.status().state == "up"
    assert load_site("tu-hpc").rehearsal
    assert slurm("scontrol", "release", job).code == 0
    eventually(lambda: f"{job}|COMPLETED" in slurm("sacct", "-X", "-n", "-P", "-o", "JobID,State").out)
    assert lines(slurm("srun", "-w", "tu02", "hostname")) == ["tu02"]


# From here on the sandbox is taken down, and brought up again for the other modules at the end.


@pytest.fixture(scope="module")
def nothing_up(sandbox: Sandbox, sandbox_is_ours: bool) -> Iterator[Folder]:
    """A machine on which no sandbox is up."""
    if not sandbox_is_ours:
        pytest.skip("a sandbox was up before the tests; it is left alone")
    sandboxes.down()
    yield folder_at(None)
    sandboxes.down()
    sandboxes.up(SHAPE)


@pytest.fixture
def hosts_before(nothing_up: Folder) -> bytes:
    """/etc/hosts without a sandbox."""
    return HOSTS_FILE.read_bytes()


def assert_nothing_is_left(folder: Folder, hosts_before: bytes) -> None:
    """No process, namespace, bridge, mount, host line, folder."""
    assert leftovers(folder) == ()
    assert bridge_owner() is None
    assert str(folder.root) not in Path("/proc/self/mountinfo").read_text()
    assert HOSTS_FILE.read_bytes() == hosts_before
    assert not folder.root.exists()
    assert sandboxes.status().state == "down"


def test_down_leaves_nothing_and_down_again_is_harmless(nothing_up: Folder, hosts_before: bytes) -> None:
    """After the session's sandbox with all its jobs."""
    assert_nothing_is_left(nothing_up, hosts_before)
    sandboxes.down()
    assert CliRunner().invoke(sandbox_app, ["status"]).exit_code == 1
    assert not load_site("tu-hpc").rehearsal


def test_an_up_that_is_killed_half_way_leaves_nothing_after_down(nothing_up: Folder, hosts_before: bytes) -> None:
    """SIGKILL while MariaDB starts: what has no record is found by its namespace."""
    code = "from hpcjobs import sandbox; sandbox.up(sandbox.Shape(like='tu-hpc', nodes=4))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as half:
        eventually((nothing_up.database / "mysql").exists)
        half.kill()
    result = sandboxes.status()
    assert result.state == "damaged"
    assert any("processes" in problem for problem in result.problems)
    sandboxes.down()
    assert_nothing_is_left(nothing_up, hosts_before)


def test_an_up_that_fails_shows_the_log_and_cleans_up(
    nothing_up: Folder, hosts_before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld cannot write its state: its last words are in the error."""
    broken = services._SETTINGS.replace("StateSaveLocation={root}/ctld", "StateSaveLocation=/proc/none")
    monkeypatch.setattr(services, "_SETTINGS", broken)
    answer: list[str] = []
    with pytest.raises(HpcJobsError, match=r"slurmctld ended while waiting(.*\n)+.*slurmctld: .*/proc/none"):
        sandboxes.up(SHAPE, say=answer.append)
    assert answer[-1] == "failed; removing what was started"
    assert_nothing_is_left(nothing_up, hosts_before)


def test_a_port_that_is_taken_is_named(nothing_up: Folder, hosts_before: bytes) -> None:
    """Before anything is started."""
    with (
        socket.create_server(("127.0.0.1", services.DATABASE_PORT)),
        pytest.raises(RequestError, match=f"port {services.DATABASE_PORT} is in use"),
    ):
        sandboxes.up(SHAPE)
    assert_nothing_is_left(nothing_up, hosts_before)


def test_a_gpu_site_gives_gpus_and_its_jobs_end_with_it(
    nothing_up: Folder, hosts_before: bytes, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES is set; ``down`` goes well with slurmctld killed and a job that ignores SIGTERM."""
    answer = CliRunner().invoke(sandbox_app, ["up", "--like", "gcp-t4", "--json"])
    assert msgspec.json.decode(answer.stdout, type=Sandbox).partitions == {"t4": ("gcp01", "gcp02")}
    for name, value in sandboxes.environment().items():
        monkeypatch.setenv(name, value)
    seen = run(["srun", "-N2", "--gres=gpu:t4:1", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES"])
    assert lines(seen) == ["gcp01 0", "gcp02 0"]
    assert run(["sbatch", "--gres=gpu:2", "--wrap=true"]).code != 0
    stubborn = 'trap "" TERM; echo $$ > pid; while :; do sleep 1; done'
    assert run(["sbatch", "-o", "/dev/null", "--gres=gpu:1", "--wrap", stubborn]).code == 0
    eventually(lambda: (workdir / "pid").exists() and (workdir / "pid").read_text().endswith("\n"))
    job = identity(int((workdir / "pid").read_text()))
    assert job is not None
    for name, held in (("ended", ()), ("held", ("-o", "hold"))):
        assert hpcjobs("submit", "--site", "gcp-t4", "-t", "5m", "--name", name, *held, "true").code == 0
    assert hpcjobs("wait", "ended").code == 0
    os.kill(pid_of(str(nothing_up.root), "slurmctld"), signal.SIGKILL)
    assert CliRunner().invoke(sandbox_app, ["down"]).exit_code == 0
    assert_nothing_is_left(nothing_up, hosts_before)
    assert identity(job[0]) != job
    states = {name: hpcjobs("show", name, "--json").json["records"][0]["state"] for name in ("ended", "held")}
    assert states == {"ended": "COMPLETED", "held": "CANCELLED"}
