#!/usr/bin/env bash
# Apptainer for this machine: to build images and to run them, as root and as an ordinary user.
#
#   containers/install_apptainer.sh [--optional] [PREFIX]
#
# One that is in PATH is taken as it is, and one that this system's own packages have is installed. Debian 12 has none:
# there Debian's current package is unpacked into PREFIX, and what it asks of a newer glibc is turned to the older one.
# Nothing else of the system changes. Run again, it only checks. --optional: a machine that cannot have it is no error.
#   PREFIX   default /var/cache/hpcjobs/apptainer for root, ~/.cache/hpcjobs/apptainer for anybody else
# The last line printed is the program's path.
set -euo pipefail

optional=''
[[ ${1:-} != --optional ]] || { optional=yes && shift; }
if [[ $EUID -eq 0 ]]; then cache=/var/cache; else cache=${XDG_CACHE_HOME:-$HOME/.cache}; fi
prefix=${1:-$cache/hpcjobs/apptainer}
helpers=(squashfs-tools squashfuse fuse-overlayfs uidmap fakeroot libseccomp2 ca-certificates)

say() { printf '==> %s\n' "$*"; }
give_up() {
    if [[ -n $optional ]]; then say "no Apptainer: $*" && exit 0; fi
    printf 'error: %s\n' "$*" >&2
    exit 1
}
apt() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@"; }

done_with() { # PROGRAM: it works, and this is where
    # An ordinary user mounts an image through FUSE.
    [[ $EUID -ne 0 || ! -c /dev/fuse ]] || chmod a+rw /dev/fuse
    say "$("$1" --version)"
    echo "$1"
    exit 0
}

install_helpers() { # Debian packages that Apptainer starts, as far as they are missing
    local name missing=()
    for name in "${helpers[@]}"; do
        [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    local line="apt-get install -y --no-install-recommends ${missing[*]}"
    [[ $EUID -eq 0 ]] || give_up "missing here; as root: $line"
    say "$line"
    apt update -qq
    apt install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

fetch() { # FOLDER: unpack Debian's current package there, with lists and caches of its own
    local work=$1 mirror
    local options=(
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts="$work/none" -o Dir::State::lists="$work/lists"
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none
    )
    mkdir -p "$work/none" "$work/lists/partial" "$work/cache/archives/partial"
    # The mirror that this machine uses already: the first of its list that has Debian itself.
    # shellcheck disable=SC2016  # the names are apt's
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' | awk '$2 !~ /-/ && $1 ~ /debian\/?$/ { print $1; exit }')
    [ -n "$mirror" ] || {
        echo "no mirror of Debian in this machine's apt sources" >&2
        return 1
    }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
    apt "${options[@]}" update -qq &&
        (cd "$work" && apt "${options[@]}" download -qq apptainer) &&
        dpkg-deb --extract "$work"/apptainer_*.deb "$work/root"
}

adapt_programs() { # TREE: make its programs run with this machine's glibc and with what its root may do
    python3 - "$1" <<'PY'
import json
import os
import struct
import sys
from pathlib import Path

VERSYM, VERNEED, DYNSYM = 0x6FFFFFFF, 0x6FFFFFFE, 11  # types of sections: symbol versions, versions needed, symbols
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE"
    " NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT"
    " SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP"
    " MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
).split()


class Elf:
    """The parts of a 64-bit ELF file that say which symbols of which versions it takes from other libraries."""

    def __init__(self, path):
        self.path, self.data = path, bytearray(path.read_bytes())
        table, = struct.unpack_from("<Q", self.data, 0x28)
        size, count = struct.unpack_from("<HH", self.data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + n * size) for n in range(count)]
        place = {section[1]: section for section in sections}
        self.symbols, self.symbols_size = place[DYNSYM][4], place[DYNSYM][5]
        self.versym, self.verneed = place[VERSYM][4], place[VERNEED][4]
        self.strings = sections[place[DYNSYM][6]][4]

    def text(self, offset):
        start = self.strings + offset
        return self.data[start : self.data.index(0, start)].decode()

    def needed_of_libc(self):
        """Version -> where it stands, its hash, its index and the offset of its name."""
        found, need = {}, self.verneed
        while True:
            _, count, library, first, following = struct.unpack_from("<HHIII", self.data, need)
            entry = need + first
            for _ in range(count):
                digest, _, index, name, onwards = struct.unpack_from("<IHHII", self.data, entry)
                if self.text(library) == "libc.so.6" and self.text(name).startswith("GLIBC_2"):
                    found[tuple(map(int, self.text(name)[6:].split(".")))] = (entry, digest, index, name)
                entry += onwards
            if not following:
                return found
            need += following

    def turn_to_older(self, ours):
        """C23 made strtol and its kin anew under other names; the old ones do what is needed here."""
        needed = self.needed_of_libc()
        if not needed:
            return
        _, digest, base, base_name = needed[min(needed)]
        for version in [version for version in needed if version > ours]:
            entry, _, index, _ = needed[version]
            for number in range(self.symbols_size // 24):
                slot = self.versym + 2 * number
                if struct.unpack_from("<H", self.data, slot)[0] & 0x7FFF != index:
                    continue
                symbol = self.symbols + 24 * number
                name, = struct.unpack_from("<I", self.data, symbol)
                if not self.text(name).startswith("__isoc23_"):
                    sys.exit(f"error: {self.path.name} needs {self.text(name)} of a newer glibc")
                struct.pack_into("<I", self.data, symbol, name + len("__isoc23_"))
                struct.pack_into("<H", self.data, slot, base)
            struct.pack_into("<I", self.data, entry, digest)
            struct.pack_into("<I", self.data, entry + 8, base_name)
        self.path.write_bytes(self.data)


def root_with_less(tree):
    """Where root itself has not every capability, Apptainer must not ask for all; those that are missing."""
    bounding = next(line for line in open("/proc/self/status") if line.startswith("CapBnd")).split()[1]
    have = [f"CAP_{name}" for bit, name in enumerate(CAPABILITIES) if int(bounding, 16) >> bit & 1]
    missing = [f"CAP_{name}" for name in CAPABILITIES if f"CAP_{name}" not in have]
    if missing:
        (tree / "etc/apptainer/capability.json").write_text(json.dumps({"users": {"root": have}}))
        settings = tree / "etc/apptainer/apptainer.conf"
        full = settings.read_text()
        settings.write_text(full.replace("root default capabilities = full", "root default capabilities = file"))
    return missing


tree = Path(sys.argv[1])
ours = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")))
starter, = tree.glob("lib/*/apptainer/bin/starter")
for program in (tree / "bin/apptainer", starter):
    Elf(program).turn_to_older(ours)
missing = ",".join(root_with_less(tree))
drop = f'[ "$(id -u)" -ne 0 ] || export APPTAINER_DROP_CAPS="${{APPTAINER_DROP_CAPS:-{missing}}}"\n' if missing else ""
start = tree / "start"
start.write_text(f'#!/bin/sh\n{drop}here=$(dirname "$(readlink -f "$0")")\nexec "$here/bin/apptainer" "$@"\n')
start.chmod(0o755)
PY
}

program=$(command -v apptainer || true)
[[ -z $program || $program == "$prefix"/* ]] || done_with "$program"
if "$prefix/bin/apptainer" --version >/dev/null 2>&1; then
    install_helpers
    done_with "$prefix/bin/apptainer"
fi
if ! command -v apt-get >/dev/null && command -v dnf >/dev/null; then # Rocky Linux, RHEL: it is in EPEL
    give_up 'not installed; as root: dnf install -y epel-release && dnf install -y apptainer'
fi
command -v apt-get >/dev/null || give_up "this is neither Debian nor Ubuntu: install it as https://apptainer.org says"
if [[ $(apt-cache policy apptainer 2>/dev/null) == *'Candidate: '[0-9]* ]]; then
    [[ $EUID -eq 0 ]] || give_up 'not installed; as root: apt-get install -y apptainer'
    say 'apt-get install -y --no-install-recommends apptainer'
    apt install -y -qq --no-install-recommends apptainer >/dev/null
    done_with "$(command -v apptainer)"
fi
[[ $(uname -m) == x86_64 && -r /usr/share/keyrings/debian-archive-keyring.gpg ]] ||
    give_up 'this system has no package of it: install it as https://apptainer.org says'
install_helpers
mkdir -p "$prefix"
exec 9>"$prefix.lock"
flock 9 # of two that start together, one installs
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
say "Apptainer from Debian's current packages, into $prefix"
fetch "$work" || give_up "it cannot be fetched from Debian's mirror; see above"
# Its programs look for their parts relative to themselves: bin, etc, lib and var side by side.
mkdir -p "$work/tree/var/lib/apptainer/mnt/session"
mv "$work/root/usr/bin" "$work/root/usr/lib" "$work/root/etc" "$work/tree/"
ln -s ../etc "$work/tree/lib/etc"
ln -s ../var "$work/tree/lib/var"
adapt_programs "$work/tree"
rm -rf "$prefix"
mkdir -p "$prefix/bin"
cp -a "$work/tree" "$prefix/tree"
ln -s ../tree/start "$prefix/bin/apptainer"
"$prefix/bin/apptainer" --version >/dev/null || give_up 'what was installed does not start; see above'
done_with "$prefix/bin/apptainer"
