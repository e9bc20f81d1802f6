"""`--stage-to`: the data is copied once per node to a disk of its own, and read there."""

from __future__ import annotations

import shutil
import time
import zlib
from dataclasses import replace
from pathlib import Path

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.distributed.process_group import RankGroup


def stage_data(config: Config, group: RankGroup) -> Config:
    """The flags with the names of the copies. The first rank of each node copies, the rest wait.

    Raises:
        UsageError: --tokens names single files, which are not all that a copy needs.
    """
    if config.stage_to is None:
        return config
    files = [path for path in config.tokens if Path(path).is_file()]
    if files:
        raise UsageError(f"--stage-to copies whole folders of --tokens, and {files[0]} is a file", hint="its folder")
    sources = [Path(path) for path in (*config.text, *config.tokens, *(() if config.data is None else (config.data,)))]
    there = {source: place(source, Path(config.stage_to)) for source in sources if source.exists()}
    began = time.perf_counter()
    if group.rank == group.hosts.index(group.hosts[group.rank]):
        for source, target in there.items():
            copy(source, target)
    group.barrier()
    group.log(f"staged {len(there)} of {len(sources)} to {config.stage_to} in {time.perf_counter() - began:.1f} s")
    where = {str(source): str(target) for source, target in there.items()}  # what is not there is the workload's to say
    data = None if config.data is None else where.get(str(Path(config.data)), config.data)
    text, tokens = (tuple(where.get(str(Path(path)), path) for path in paths) for paths in (config.text, config.tokens))
    return replace(config, data=data, text=text, tokens=tokens)


def place(source: Path, folder: Path) -> Path:
    """A name of its own for each state of the source: what has changed since it was copied is copied again."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    mark = zlib.crc32(repr((str(source.resolve()), stats)).encode())
    return folder / f"{source.stem}-{mark:08x}{source.suffix}"


def copy(source: Path, target: Path) -> None:
    """Written beside and renamed: what has the target's name is whole."""
    if target.exists():
        return
    beside = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
            shutil.copytree(source, beside)
        else:
            shutil.copyfile(source, beside)
        beside.rename(target)
    except OSError as error:
        raise UsageError(f"--stage-to {target.parent}: {error}", hint="a folder on a local disk with space") from error
