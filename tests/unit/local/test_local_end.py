"""How jobs end: by themselves, by a limit, by a wish, by the death of those who watch them."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcjobs.errors import RequestError, UnknownJobError
from hpcjobs.scheduler.base import State

from .machines import Machine, alive, until

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("pid", "w").write(str(os.getpid()))
os.rename("pid", "stubborn")
while True:
    time.sleep(60)
"""


def stubborn_pid(machine: Machine) -> int:
    """The process number of a program that does not heed SIGTERM, once it runs."""
    until(lambda: (machine.here / "stubborn").exists())
    return int((machine.here / "stubborn").read_text())


def test_what_a_job_used_is_recorded(machine: Machine) -> None:
    before = time.time()
    code = "import time; b = bytearray(80 << 20); t = time.process_time()\nwhile time.process_time() - t < 0.3: pass"
    job = machine.submit(sys.executable, "-c", code, name="busy")
    record = machine.end_of(job)
    assert (record.state, record.exit_code, record.signal, record.reason) == (State.COMPLETED, 0, None, None)
    assert (record.name, record.source, record.nnodes) == ("busy", "local", 1)
    assert record.submitted is not None
    assert record.started is not None
    assert record.ended is not None
    assert before <= record.submitted <= record.started <= record.ended <= time.time()
    assert record.elapsed_s == pytest.approx(record.ended - record.started)
    assert record.cpu_s is not None
    assert 0.3 <= record.cpu_s < 10
    assert record.max_rss_bytes is not None
    assert 80 << 20 <= record.max_rss_bytes < 200 << 20
    assert record.command == str(machine.plans[job].run_dir / "job.sh")


def test_the_exit_code_is_the_scripts_own(machine: Machine) -> None:
    record = machine.end_of(machine.submit("bash", "-c", "exit 42"))
    assert (record.state, record.exit_code, record.reason) == (State.FAILED, 42, "NonZeroExitCode")


def test_a_script_that_a_signal_ends_is_recorded_with_the_signal(machine: Machine) -> None:
    job = machine.submit("bash", "-c", "kill -KILL $(ps -o ppid= -p $(ps -o ppid= -p $PPID)); sleep 60")
    record = machine.end_of(job)
    assert (record.state, record.exit_code, record.signal) == (State.FAILED, 137, 9)
    assert record.reason == "RaisedSignal:9"


def test_a_failing_rank_ends_the_job_with_its_code_and_is_named(machine: Machine) -> None:
    late = 'if [ "$RANK" = 1 ]; then until [ -e 0 ] && [ -e 2 ]; do sleep 0.05; done; exit 9; fi'
    arguments = f'echo here; touch "$RANK"; {late}; sleep 60'
    job = machine.submit("bash", "-c", arguments, ntasks_per_node=3)
    record = machine.end_of(job)
    state = json.loads((machine.plans[job].run_dir / "state.json").read_text())
    assert (record.state, record.exit_code) == (State.FAILED, 9)
    assert (state["job_id"], state["exit_code"]) == (job, 9)
    assert (state["first_failure"]["rank"], state["first_failure"]["exit_code"]) == (1, 9)
    assert {"0: here", "1: here", "2: here"} <= set(machine.log(job).splitlines())


def test_a_cancelled_waiting_job_is_gone_at_once(machine: Machine) -> None:
    first = machine.held("first", cpus_per_task=2)
    machine.wait_for("first")
    waiting, behind = machine.held("waiting", cpus_per_task=2), machine.submit("true")
    machine.local.cancel([waiting])
    record = machine.record(waiting)
    assert (record.state, record.started, record.exit_code) == (State.CANCELLED, None, None)
    assert record.ended is not None
    assert list(machine.queue()) == [first, behind]
    machine.let_go("first")
    assert machine.end_of(behind).state == State.COMPLETED
    assert not machine.runs("waiting")
    until(lambda: not machine.keepers(waiting))


def test_a_cancelled_running_job_may_write_its_last_lines(machine: Machine) -> None:
    arguments = 'trap "sleep 0.2; echo saved; exit 5" TERM; echo ready > ready$RANK; while :; do sleep 0.05; done'
    job = machine.submit("bash", "-c", arguments, ntasks_per_node=2)
    until(lambda: (machine.here / "ready0").exists() and (machine.here / "ready1").exists())
    machine.local.cancel([job])
    record = machine.end_of(job)
    assert (record.state, record.reason) == (State.CANCELLED, "cancelled")
    assert sorted(line for line in machine.log(job).splitlines() if "saved" in line) == ["0: saved", "1: saved"]
    assert json.loads((machine.plans[job].run_dir / "state.json").read_text())["state"] == "CANCELLED"


def test_a_program_hears_of_the_end_once(machine: Machine) -> None:
    arguments = 'trap "echo heard >> heard" TERM; touch ready; for _ in {1..12}; do sleep 0.05; done'
    job = machine.submit("bash", "-c", arguments)
    until(lambda: (machine.here / "ready").exists())
    machine.local.cancel([job])
    machine.end_of(job)
    assert (machine.here / "heard").read_text() == "heard\n"


@pytest.mark.usefixtures("short_grace")
def test_a_program_that_does_not_heed_the_end_is_killed_after_the_grace(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", STUBBORN)
    pid = stubborn_pid(machine)
    before = time.monotonic()
    machine.local.cancel([job])
    assert machine.state(job) == State.COMPLETING
    assert machine.end_of(job).state == State.CANCELLED
    assert time.monotonic() - before >= 1
    assert not alive(pid)


def test_nothing_is_cancelled_when_one_id_is_unknown(machine: Machine) -> None:
    job = machine.held("first")
    machine.wait_for("first")
    for unknown in ("L99", f"{job}_3", "7", "../L1"):
        with pytest.raises(UnknownJobError, match=unknown):
            machine.local.cancel([job, unknown])
    assert machine.state(job) == State.RUNNING
    machine.let_go("first")
    assert machine.end_of(job).state == State.COMPLETED
    machine.local.cancel([job])
    assert machine.state(job) == State.COMPLETED
    assert machine.local.account(["L99", "7", "../L1"]) == []


def test_a_whole_array_is_cancelled_with_its_running_tasks(machine: Machine) -> None:
    job = machine.submit("sleep", "60", array="0-5")
    until(lambda: [s for s, _ in machine.queue().values()].count("RUNNING") == 2)
    machine.local.cancel([job])
    assert machine.records(job)[f"{job}_[2-5]"].state == State.CANCELLED
    ends = machine.ends_of(job)
    assert list(ends) == [f"{job}_0", f"{job}_1", f"{job}_[2-5]"]
    assert {record.state for record in ends.values()} == {State.CANCELLED}
    until(lambda: not machine.keepers(job))


def test_the_time_limit_ends_a_job(machine: Machine) -> None:
    record = machine.end_of(machine.submit("sleep", "60", time="1s"))
    assert (record.state, record.reason) == (State.TIMEOUT, "TimeLimit")
    assert record.elapsed_s is not None
    assert 1 <= record.elapsed_s < 30


def test_a_signal_before_the_time_limit_reaches_each_program_once(machine: Machine) -> None:
    arguments = 'trap "echo $RANK >> heard" USR1; until [ -e heard ]; do sleep 0.05; done; sleep 0.3'
    job = machine.submit("bash", "-c", arguments, ntasks_per_node=2, time="20s", signal="USR1@19")
    record = machine.end_of(job)
    assert (record.state, record.reason) == (State.COMPLETED, None)
    assert record.elapsed_s is not None
    assert 1 <= record.elapsed_s < 19
    assert sorted((machine.here / "heard").read_text().split()) == ["0", "1"]


def test_a_signal_for_the_script_alone_does_not_reach_the_program(machine: Machine) -> None:
    arguments = 'trap "echo heard" USR1; for _ in {1..32}; do sleep 0.05; done'
    record = machine.end_of(machine.submit("bash", "-c", arguments, time="20s", signal="B:USR1@19"))
    assert (record.state, record.signal) == (State.FAILED, signal.SIGUSR1)  # the script has no trap for it
    assert "heard" not in machine.log(record.job_id)


@pytest.mark.parametrize("text", ["NONE@5", "USR1@", "0", "999", "R:USR1"])
def test_a_signal_that_cannot_be_is_refused(machine: Machine, text: str) -> None:
    with pytest.raises(RequestError, match="signal"):
        machine.submit("true", signal=text)


def test_processes_a_job_leaves_behind_end_with_it(machine: Machine) -> None:
    say = "echo $$ > {0}; exec sleep 60"
    leave = [
        "env -i setsid bash -c '" + say.format("pid.bare") + "' &",
        "setsid bash -c '" + say.format("pid.away") + "' &",
        "(trap '' TERM; bash -c '" + say.format("pid.deaf") + "') &",
        "until [ -s pid.bare -a -s pid.away -a -s pid.deaf ]; do sleep 0.01; done",
    ]
    job = machine.submit("bash", "-c", "\n".join(leave))
    assert machine.end_of(job).state == State.COMPLETED
    left = [int((machine.here / name).read_text()) for name in ("pid.bare", "pid.away", "pid.deaf")]
    assert not any(alive(pid) for pid in left)


def test_a_job_submitted_by_a_job_outlives_it(machine: Machine) -> None:
    inner = machine.held("inner")
    machine.let_go("inner")
    machine.end_of(inner)
    (machine.here / "inner.runs").unlink()
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from local.machines import Machine;"
        "m = Machine(Path('.')); Path('inner.go').unlink(); print(m.held('inner'))"
    )
    outer = machine.submit(sys.executable, "-c", code, str(Path(__file__).parent.parent))
    assert machine.end_of(outer).state == State.COMPLETED
    nested = machine.log(outer).strip()
    machine.wait_for("inner")
    assert machine.state(nested) == State.RUNNING
    assert (machine.here / "inner.runs").read_text().split()[0] == nested
    machine.let_go("inner")
    assert machine.end_of(nested).state == State.COMPLETED


@pytest.mark.usefixtures("short_grace")
def test_a_killed_supervisor_takes_its_job_along_and_frees_the_slots(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", STUBBORN, cpus_per_task=2)
    pid = stubborn_pid(machine)
    waiting = machine.held("waiting")
    os.kill(machine.keepers(job)[0], signal.SIGKILL)
    machine.wait_for("waiting")  # nobody has asked in between
    record = machine.record(job)
    assert (record.state, record.reason) == (State.FAILED, "supervisor was killed")
    assert not alive(pid)
    machine.let_go("waiting")
    assert machine.end_of(waiting).state == State.COMPLETED


def test_a_job_told_to_end_by_its_supervisors_death_may_save(machine: Machine) -> None:
    arguments = 'trap "sleep 0.2; echo saved; exit 5" TERM; touch ready; while :; do sleep 0.05; done'
    job = machine.submit("bash", "-c", arguments)
    until(lambda: (machine.here / "ready").exists())
    os.kill(machine.keepers(job)[0], signal.SIGKILL)
    assert machine.end_of(job).state == State.FAILED
    assert "saved" in machine.log(job)


def test_when_supervisor_and_guard_are_killed_a_program_that_heeds_the_end_ends(machine: Machine) -> None:
    job = machine.submit("bash", "-c", "echo $$ > part; mv part pid; exec sleep 60")
    until(lambda: (machine.here / "pid").exists())
    for keeper in machine.keepers(job):
        os.kill(keeper, signal.SIGKILL)
    until(lambda: not alive(int((machine.here / "pid").read_text())))  # nobody has asked in between
    until(lambda: not machine.keepers(job))
    assert machine.record(job).reason == "supervisor was killed"


def test_when_supervisor_and_guard_are_killed_the_next_look_clears_up(machine: Machine) -> None:
    job = machine.submit("env", "-i", sys.executable, "-c", STUBBORN)
    pid = stubborn_pid(machine)
    keepers = machine.keepers(job)
    assert len(keepers) == 2
    for keeper in keepers:
        os.kill(keeper, signal.SIGKILL)
    until(lambda: not machine.keepers(job))
    record = machine.record(job)
    assert (record.state, record.reason) == (State.FAILED, "supervisor was killed")
    until(lambda: not alive(pid))
    assert machine.queue() == {}


def test_the_next_in_turn_notices_the_death_of_a_job_that_ran_before_it_was_next(machine: Machine) -> None:
    running = machine.held("running")
    machine.held("ending")
    machine.wait_for("running")
    machine.wait_for("ending")
    machine.held("before")
    last = machine.held("last")
    until(lambda: machine.queue()[last] == ("PENDING", "Priority"))
    machine.let_go("ending")
    machine.wait_for("before")
    for keeper in machine.keepers(running):
        os.kill(keeper, signal.SIGKILL)
    machine.wait_for("last")  # nobody has asked in between
    for name in ("before", "last"):
        machine.let_go(name)


def test_a_job_behind_one_that_waited_for_another_notices_its_death(machine: Machine) -> None:
    first = machine.held("first", cpus_per_task=2)
    machine.wait_for("first")
    machine.held("second")
    third = machine.held("third", cpus_per_task=2, dependency=f"afterany:{first}")
    last = machine.held("last")
    until(lambda: machine.queue()[last] == ("PENDING", "Priority"))
    machine.let_go("first")
    machine.wait_for("second")  # the third, too large for what is left, is next
    until(lambda: machine.queue()[third] == ("PENDING", "Resources"))
    for keeper in machine.keepers(third):
        os.kill(keeper, signal.SIGKILL)
    until(lambda: machine.runs("last"))  # nobody has asked in between
    for name in ("second", "last"):
        machine.let_go(name)


def test_one_that_waits_notices_that_all_before_it_were_killed(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", STUBBORN, cpus_per_task=2)
    stubborn_pid(machine)
    middle, last = machine.held("middle", cpus_per_task=2), machine.held("last", cpus_per_task=2)
    assert machine.queue()[last] == ("PENDING", "Priority")
    for keeper in (*machine.keepers(middle), *machine.keepers(job)):
        os.kill(keeper, signal.SIGKILL)
    machine.wait_for("last")
    assert machine.state(job) == machine.state(middle) == State.FAILED
    machine.let_go("last")


def test_the_tasks_of_an_array_survive_its_supervisor(machine: Machine) -> None:
    os.mkfifo(machine.here / "go")
    job = machine.submit("bash", "-c", "touch runs; read -r _ < go", array="0-3%1")
    until(lambda: (machine.here / "runs").exists() and machine.state(f"{job}_0") == State.RUNNING)
    os.kill(machine.keepers(job)[0], signal.SIGKILL)
    until(lambda: machine.records(job)[f"{job}_[1-3]"].state.ended)
    assert machine.state(f"{job}_0") == State.RUNNING
    assert machine.state(f"{job}_2") == State.FAILED
    (machine.here / "go").write_text("go\n")
    assert machine.end_of(f"{job}_0").state == State.COMPLETED


def test_a_supervisor_that_is_told_to_end_ends_its_job(machine: Machine) -> None:
    job = machine.held("first")
    machine.wait_for("first")
    os.kill(machine.keepers(job)[0], signal.SIGTERM)
    assert machine.end_of(job).state == State.CANCELLED


def test_a_log_that_cannot_be_written_fails_the_job_with_the_reason(machine: Machine) -> None:
    machine.held("first", cpus_per_task=2)
    machine.wait_for("first")
    job = machine.submit("true")
    (machine.plans[job].run_dir / "logs").rmdir()
    machine.let_go("first")
    record = machine.end_of(job)
    assert record.state == State.FAILED
    assert "No such file" in str(record.reason)


HOSTILE = [
    "two words",
    "'",
    '"',
    "$(touch x)",
    "`touch x`",
    "\\",
    "\\n",
    "new\nline",
    "a,b",
    "नमस्ते",
    "*",
    "-n",
    "",
    "%j",
]


def test_hostile_words_arrive_unchanged(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = machine.here / "a 'b' \"c\" $(touch x) \\ , नमस्ते\nnew"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
    env = {f"VALUE_{n}": value for n, value in enumerate(HOSTILE)}
    job = machine.submit(sys.executable, "-c", code, *HOSTILE, env=env, name="hostile")
    assert machine.end_of(job).state == State.COMPLETED
    argv, environment, cwd = json.loads(machine.log(job))
    assert argv == HOSTILE
    assert {name: environment[name] for name in env} == env
    assert cwd == str(folder)
    assert list(folder.parent.glob("**/x")) == []


def test_what_an_enclosing_job_left_in_the_environment_stays_outside(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("MY_OWN", "kept")
    monkeypatch.setenv("BASH_FUNC_greet%%", "() { echo hello; }")
    job = machine.submit("bash", "-c", 'echo "$SLURM_JOB_ID:$RANK:$MY_OWN:$HPCJOBS_JOB_ID:$(greet)"')
    machine.end_of(job)
    assert machine.log(job) == f":0:kept:{job}:hello\n"


def test_a_site_file_of_one_line_needs_no_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.here / "mine.yaml").write_text("scheduler: local\npython: /no/python/has/torch\n")
    job = machine.submit("bash", "-c", 'echo "$RANK of $WORLD_SIZE"', site="./mine.yaml", ntasks_per_node=2)
    assert machine.end_of(job).state == State.COMPLETED, machine.log(job)
    assert sorted(machine.log(job).splitlines()) == ["0: 0 of 2", "1: 1 of 2"]


MODULE = """() {
    case ":$LOADEDMODULES:" in *":$2:"*) return 0 ;; esac
    export LOADEDMODULES=$LOADEDMODULES:$2 OF_THE_MODULE=yes
}"""
"""As the real one: what counts as loaded is not loaded again."""


def test_a_module_that_was_loaded_at_login_is_loaded_again_in_the_job(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.here / "modules.yaml").write_text("scheduler: local\nmodules: [openmpi/4]\n")
    monkeypatch.setenv("BASH_FUNC_module%%", MODULE)
    monkeypatch.setenv("LOADEDMODULES", "gcc/12:openmpi/4")
    monkeypatch.setenv("_LMFILES_", "/modules/gcc/12:/modules/openmpi/4")
    job = machine.submit("bash", "-c", 'echo "$OF_THE_MODULE"', site="./modules.yaml", launcher="spawn")
    assert machine.end_of(job).state == State.COMPLETED
    assert machine.log(job) == "yes\n"


def test_what_is_kept_about_jobs_is_nobody_elses(machine: Machine) -> None:
    machine.end_of(machine.submit("true"))
    state = Path(os.environ["HOME"]) / ".local" / "state" / "hpcjobs"
    assert {path.stat().st_mode & 0o077 for path in (*state.rglob("jobs"), *state.rglob("L1"))} == {0}


def test_runtime_needs_nothing_but_python() -> None:
    code = (
        "import sys, importlib, importlib.util\n"
        "root = importlib.util.find_spec('hpcjobs').submodule_search_locations[0]\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [root.rpartition('/')[0]]\n"
        "for name in ('msgspec', 'jinja2', 'yaml', 'typer', 'rich', 'submitit'): sys.modules[name] = None\n"
        "for name in ('scheduler.local.supervisor', 'runtime.spawn'): importlib.import_module(f'hpcjobs.{name}')\n"
        "names = [m.split('.') for m in sys.modules if m.startswith('hpcjobs')]\n"
        "print(['.'.join(n) for n in names if n[1:2] not in (['runtime'], ['processes'], ['files'])])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {"queue", "supervisor"}
    packages = {"hpcjobs", "hpcjobs.scheduler", "hpcjobs.scheduler.local"}
    assert set(ast.literal_eval(done.stdout)) == packages | {f"hpcjobs.scheduler.local.{name}" for name in modules}
