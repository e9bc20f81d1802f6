"""Builds an image from a recipe, inspects it, moves it into the site's folder and records the build."""

from __future__ import annotations

import configparser
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

import hpcjobs
from hpcjobs.containers.images import (
    SUFFIX,
    ImageManifest,
    Recipe,
    check_whole,
    fingerprint,
    folder_of,
    manifest_path,
    read_manifest,
    recipe_hash,
    resolve_arguments,
    sha256,
)
from hpcjobs.containers.look import look, program_here
from hpcjobs.errors import CommandMissingError, ConfigError, HpcJobsError, RequestError, reason_of, warn_without_locks
from hpcjobs.files import lock_file, write_beside
from hpcjobs.processes.programs import run, run_following
from hpcjobs.site.models import Site

KEYS = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "proxy", "timeout")
_MANY = ("extra-index-url", "find-links", "trusted-host")


def settings(environ: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Key -> values, as pip would read them: the environment over the user's file over the machine's."""
    env = os.environ if environ is None else environ
    settings: dict[str, list[str]] = {}
    for path in _files(env):
        parser = configparser.RawConfigParser()
        parser.read(path, encoding="utf-8")
        for section in ("global", "install"):
            for key in KEYS:
                if parser.has_option(section, key):
                    settings[key] = parser.get(section, key).split()
    for key in KEYS:
        if value := env.get(f"PIP_{key.upper().replace('-', '_')}"):
            settings[key] = value.split()
    return settings


def _files(env: Mapping[str, str]) -> Iterator[Path]:
    home = Path(env.get("HOME") or Path.home())
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    if named := env.get("PIP_CONFIG_FILE"):
        yield Path(named)


def lay_out(folder: Path, *, at: str, wheels: Path | None, package: Path) -> list[tuple[str, str]]:
    """Make ``folder``, bound ``at`` that path in the build, with ``pip.conf`` and a subfolder per folder that it names.

    ``wheels`` is bound to its ``wheels``; ``package``, for the recipe's test, to its ``python``. Returns the binds as
    (source, target), ``folder`` itself first.
    """
    folder.mkdir(mode=0o700)
    binds = [(str(folder), at)]

    def seen(source: Path, name: str) -> str:
        (folder / name).mkdir(parents=True)
        binds.append((str(source), f"{at}/{name}"))
        return f"{at}/{name}"

    lines = ["[global]", "disable-pip-version-check = true", "root-user-action = ignore"]
    for key, values in settings().items():
        if key == "cert":
            shutil.copyfile(values[0], folder / "cert.pem")
            values = [f"{at}/cert.pem"]
        mapped = []
        for number, value in enumerate(values):
            local = Path(value.removeprefix("file://"))
            if key in _MANY and local.is_absolute() and local.is_dir():
                if key == "find-links":
                    value = seen(local, f"{key}{number}")
                else:  # an index may point to files in its parent folder
                    value = f"file://{seen(local.parent, f'{key}{number}')}/{local.name}"
            mapped.append(value)
        lines.append(f"{key} = " + "\n    ".join(mapped))
    seen(package, f"python/{package.name}")
    if wheels is not None:
        seen(wheels, "wheels")
    conf = folder / "pip.conf"
    conf.touch(mode=0o600)
    conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return binds


SEEN = "/mnt"
"""Mount point of the settings folder during a build: every image has it, so it need not be created."""
_LOG_LINES = 15

Say = Callable[[str], None]


class BuiltImage(NamedTuple):
    """Result of a build."""

    path: Path
    manifest: ImageManifest
    new: bool
    """False: the image was up to date and was not built again."""


def build(
    recipe: Recipe,
    site: Site,
    *,
    base: str | None = None,
    arguments: Mapping[str, str] | None = None,
    wheels: Path | None = None,
    fakeroot: bool = False,
    force: bool = False,
    say: Say = lambda line: None,
) -> BuiltImage:
    """Build ``recipe`` for ``site``; ``say`` gets a line for each step.

    Args:
        base: image to start from: ``debian:12`` (Docker's), ``SCHEME://...``, or a file or folder of this machine.
        wheels: folder of wheels compiled earlier on the same distribution, read and added to.
        force: build also if the image is up to date.

    Raises:
        RequestError: an argument that the recipe does not have, or a folder that cannot be written.
        HpcJobsError: the build failed; with its last lines.
    """
    if site.containers.runtime == "pyxis":
        raise RequestError(
            f"site {site.name} ({site.path}) runs images by pyxis, and what is built here is Apptainer's",
            hint="enroot import makes a .sqsh file of an image in a registry",
        )
    resolved = resolve_arguments(recipe, {**_base_arguments(base), **(arguments or {})})
    digest = _digest_of(resolved)
    expected_hash = recipe_hash(recipe, resolved, digest)
    image = _writable(folder_of(site)) / f"{recipe.name}{SUFFIX}"
    with _alone(image, say):
        existing = None if force else read_manifest(image)
        if existing is not None and existing.recipe_hash == expected_hash:
            return BuiltImage(image, existing, new=False)
        started = time.time()
        with _workplace(site) as work:
            draft = work / image.name
            _run(
                recipe, site, resolved, draft, wheels=wheels, fakeroot=fakeroot, log=image.with_suffix(".log"), say=say
            )
            check_whole(draft)
            say("looking into it")
            facts = look(site, str(draft))
            beside = image.with_name(f".{image.name}.{os.urandom(8).hex()}")  # no name that others can take before
            shutil.move(str(draft), beside)
        manifest = ImageManifest(
            schema=1,
            name=recipe.name,
            recipe=str(recipe.path),
            recipe_hash=expected_hash,
            arguments=resolved,
            base=f"{resolved.get('bootstrap', '')}:{resolved.get('base', '')}".strip(":"),
            base_digest=digest,
            build_host=os.uname().nodename,
            built=started,
            took_s=round(time.time() - started, 1),
            runtime=run([program_here(site), "--version"]).out.strip(),
            size=beside.stat().st_size,
            fingerprint=fingerprint(beside),
            sha256=sha256(beside),
            facts=facts,
        )
        os.replace(beside, image)
        write_beside(manifest_path(image), msgspec.json.format(msgspec.json.encode(manifest), indent=1), mode=0o644)
    return BuiltImage(image, manifest, new=True)


def last_build(recipe: Recipe, site: Site) -> ImageManifest | None:
    """The manifest of the image that ``recipe`` built last; None without a readable one."""
    try:
        return read_manifest(folder_of(site) / f"{recipe.name}{SUFFIX}")
    except ConfigError:  # a build with --force replaces it
        return None


def _base_arguments(base: str | None) -> dict[str, str]:
    """``--base`` as the arguments ``bootstrap`` and ``base``, which every recipe with a base has."""
    if base is None:
        return {}
    if "://" in base:
        scheme, _, name = base.partition("://")
        return {"bootstrap": scheme, "base": name}
    path = Path(base).expanduser()
    if path.exists():
        return {"bootstrap": "localimage", "base": str(path.absolute())}
    if base.startswith((".", "/", "~")) or base.endswith(SUFFIX):
        raise RequestError(f"--base {base}: there is no such file or folder")
    return {"bootstrap": "docker", "base": base}


def _digest_of(arguments: Mapping[str, str]) -> str | None:
    """The digest of the base, which changes with its content; None if it is unknown before the build."""
    name = arguments.get("base", "")
    path = Path(name)
    if arguments.get("bootstrap") == "localimage" and path.is_file():
        known = read_manifest(path)
        return known.sha256 if known else sha256(path)
    return name.partition("@")[2] or None


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"image folder {folder} cannot be made: {error.strerror}", hint="containers.folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise RequestError(f"image folder {folder} cannot be written by you", hint="containers.folder of the site file")
    return folder


@contextmanager
def _alone(image: Path, say: Say) -> Iterator[None]:
    """Let one build of an image run at a time; a second one waits, and then finds the image built."""
    path = image.with_name(f".{image.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RequestError(f"{path} cannot be opened: {reason_of(error)}", hint="remove it") from error
    with os.fdopen(descriptor, "rb+") as lock:
        try:
            if not lock_file(lock.fileno(), wait=False):
                warn_without_locks(image.parent, f"build {image.name} twice")
        except BlockingIOError:
            say(f"another build of {image.name} is under way: waiting for it")
            lock_file(lock.fileno())
        yield


@contextmanager
def _workplace(site: Site) -> Iterator[Path]:
    """A folder to build in, removed afterwards."""
    configured = site.containers.build_folder
    root = None if configured is None else Path(os.path.expandvars(configured)).expanduser()
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hpcjobs-build-", dir=root, ignore_cleanup_errors=True) as work:
        yield Path(work)


def _run(
    recipe: Recipe,
    site: Site,
    arguments: Mapping[str, str],
    draft: Path,
    *,
    wheels: Path | None,
    fakeroot: bool,
    log: Path,
    say: Say,
) -> None:
    work = draft.parent
    (work / "tmp").mkdir()
    definition = work / recipe.path.name  # the text that was trusted: the file may have changed since
    definition.write_text(recipe.text, encoding="utf-8")
    (work / "arguments").write_text("".join(f"{name}={value}\n" for name, value in arguments.items()))
    seen = lay_out(work / "seen", at=SEEN, wheels=wheels, package=Path(hpcjobs.__file__).resolve().parent)
    command = [
        *(program_here(site), "build", *(("--fakeroot",) if fakeroot else ())),
        *(arg for source, target in seen for arg in ("--bind", f"{source}:{target}")),
        *("--build-arg-file", str(work / "arguments"), "--mksquashfs-args", "-comp zstd -Xcompression-level 3"),
        *(str(draft), str(definition)),
    ]
    started, lines = time.monotonic(), list[str]()
    log.unlink(missing_ok=True)  # who may write to the folder could have put a link there
    with log.open("x", encoding="utf-8") as file:

        def log_line(line: str) -> None:
            file.write(f"{line}\n")
            lines.append(line)
            if step := _step(line):
                say(f"{time.monotonic() - started:5.0f} s  {step}")

        try:
            code = run_following(
                command, log_line, cwd=str(recipe.path.parent), env={"APPTAINER_TMPDIR": str(work / "tmp")}
            )
        except CommandMissingError as error:
            raise CommandMissingError(f"{command[0]}: not found here", hint="build on a node: --submit") from error
    if code != 0:
        own_ids = os.geteuid() != 0 and any("nvalid argument" in line for line in lines)
        hint = "use --fakeroot; it needs a line of yours in /etc/subuid and /etc/subgid. " if own_ids else ""
        told_last = "\n  ".join(line for line in lines if line.strip())[-4000:].splitlines()[-_LOG_LINES:]
        raise HpcJobsError(
            f"the build of {recipe.path} ended with {code}:\n" + "\n".join(told_last),
            hint=f"{hint}all of it is in {log}",
        )


def _step(line: str) -> str | None:
    """Whether a line of the build's output is a step: Apptainer's own, or a command of the recipe's shell."""
    text = line.strip()
    if text.startswith("INFO:"):
        return text.removeprefix("INFO:").strip()
    return text[2:][:100] if text.startswith("+ ") else None
