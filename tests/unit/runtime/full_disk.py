"""Runs on disks of every size, each a tmpfs: `python full_disk.py kit|ddp KEEP`, in an empty folder. Prints JSON lines.

Each run saves steps 1, 2 and 3 and ends. Then its disk grows, and it is started again: with room it goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import hpcjobs.runtime
from hpcjobs import trainers
from hpcjobs.runtime import checkpoint_writer, checkpoints, signals

SIZES = {"kit": (range(1, 16), range(2, 16)), "ddp": (range(5, 19), range(5, 14))}
"""Pages and inodes of the disks: from no room for one checkpoint to room for all that the run writes."""
ROOM = "size=16m,nr_inodes=1000"
PAGE_KIB = 4


def save_three(kind: str, keep: int, folder: Path) -> int:
    """One run; its exit code."""
    if kind == "kit":
        mine = hpcjobs.runtime.start(run_dir=str(folder), keep=keep)
        print("resumed at", mine.step, mine.load() or "", flush=True)
        for step in range(mine.step + 1, 4):
            mine.save(step, {"step": step, "weights": str(step) * 9000})
            mine.log(step, loss=1.0)
        mine.finish()
        return 0
    os.environ["HPCJOBS_RUN_DIR"] = str(folder)
    flags = ("--workload", "worlds:noisy_points", "--steps", "3", "--checkpoint-every", "1", "--eval-every", "0")
    return trainers.run(kind, [*flags, "--no-probe", "--log-every", "1", "--checkpoint-keep", str(keep)])


def run_child(kind: str, keep: int, folder: Path, *, patience_s: float, output: Path) -> int:
    """The exit code of a run that insists for `patience_s` on its last checkpoint."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                signals.LAST_SAVE_S = patience_s
                checkpoint_writer.FIRST_PAUSE_S = checkpoint_writer.INSISTING_PAUSE_S = 0.01
                complete = checkpoints.Draft.complete

                def note(draft: checkpoints.Draft, sums: checkpoints.Sums) -> Path:
                    place = complete(draft, sums)
                    with output.with_suffix(".completed").open("a") as completed:
                        completed.write(f"{draft.meta.step}\n")
                    return place

                checkpoints.Draft.complete = note  # type: ignore[method-assign]
                code = save_three(kind, keep, folder)
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException as error:
                code = getattr(error, "code", 1)
                print(f"{type(error).__name__}: {error}", flush=True)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def list_sound(folder: Path) -> list[int]:
    places = checkpoints.steps(folder / checkpoints.FOLDER)
    return [int(place.name[5:13]) for place in places if checkpoints.damage(place) is None]


def try_disk(kind: str, keep: int, options: str, name: str) -> dict[str, object]:
    disk = Path(name).absolute()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(disk)], check=True)
    try:
        folder = disk / "run"
        with contextlib.suppress(OSError):
            folder.mkdir()
        output = Path(f"{name}.out").absolute()
        code = run_child(kind, keep, folder, patience_s=0.05, output=output)
        sound, completed = list_sound(folder), output.with_suffix(".completed")
        steps = [int(step) for step in completed.read_text().split()] if completed.exists() else []
        subprocess.run(["mount", "-o", f"remount,{ROOM}", str(disk)], check=True)
        again = run_child(kind, keep, folder, patience_s=60.0, output=output.with_suffix(".again"))
        return {
            "options": options, "code": code, "completed": steps, "sound": sound,
            "again": again, "then": list_sound(folder), "output": output.read_text(),
            "output_again": output.with_suffix(".again").read_text(),
        }  # fmt: skip
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def main(kind: str, keep: int) -> None:
    if kind != "kit":
        import hpcjobs.trainers.loop  # noqa: F401 (once, for all children)
    pages, inodes = SIZES[kind]
    for count in pages:
        print(
            json.dumps(try_disk(kind, keep, f"size={PAGE_KIB * count}k,nr_inodes=1000", f"pages-{count}")), flush=True
        )
    for count in inodes:
        print(json.dumps(try_disk(kind, keep, f"size=16m,nr_inodes={count}", f"inodes-{count}")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
