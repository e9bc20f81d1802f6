#!/usr/bin/env bash
# Horovod for PyTorch, with MPI and Gloo, and with NCCL for GPUs, into a Python environment that has torch already.
#
#   containers/install_horovod.sh [--optional] [--wheel] [--cpu] [PYTHON]
#
# PYTHON is the checkout's .venv or the active python unless it is said. --optional: a machine that cannot build it,
# and whose packages this user may not install, is no error. --wheel: have a wheel, and install nothing.
# --cpu: without NCCL also where this machine has GPUs; horovod_gpu.py decides otherwise.
# Horovod's last release does not compile against today's torch as it is; this builds it once (two to three
# minutes), keeps the wheel by torch, Python, MPI, CUDA and NCCL, installs it and checks it. Run again, it only checks.
#   HPCJOBS_WHEELS   where wheels are kept (default: ~/.cache/hpcjobs/wheels)
#   CXX              the compiler (default: g++)
#   MAKEFLAGS        parallel jobs (default: one per CPU)
set -euo pipefail

say() { printf '==> %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
cannot_build() { # no error where Horovod is optional
    [[ -n $optional ]] || die "$*"
    say "no Horovod: $*"
    echo "$*" >"$stated"
    exit 0
}

version=0.28.1
compiler=${CXX:-g++}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
optional='' wheel_only='' cpu=''
while [[ ${1:-} == --* ]]; do
    case $1 in
        --optional) optional=yes ;;
        --wheel) wheel_only=yes ;;
        --cpu) cpu=yes ;;
        *) die "unknown option $1: --optional, --wheel, --cpu" ;;
    esac
    shift
done
python=${1:-}
[[ -n $python ]] || { [[ -x $here/../.venv/bin/python ]] && python=$here/../.venv/bin/python || python=python; }
stated=$("$python" -c 'import sys; print(sys.prefix)')/.no-horovod # why there is none: its tests may skip then

# Programs the build needs, by the package that has each, of Debian or of Rocky Linux.
need_programs() {
    local -A package=(["$compiler"]=g++ [make]=make [cmake]=cmake [mpicxx]=libopenmpi-dev [mpirun]=openmpi-bin)
    local program missing=() install='apt-get install -y --no-install-recommends' headers=python%d.%d-dev
    if ! command -v apt-get >/dev/null && command -v dnf >/dev/null; then
        package=(["$compiler"]=gcc-c++ [make]=make [cmake]=cmake [mpicxx]=openmpi-devel [mpirun]=openmpi)
        install='dnf install -y' headers=python%d.%d-devel
    fi
    for program in "${!package[@]}"; do
        command -v "$program" >/dev/null || missing+=("${package[$program]}")
    done
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        missing+=("$("$python" -c 'import sys; print(sys.argv[1] % sys.version_info[:2])' "$headers")")
    ((${#missing[@]})) || return 0
    [[ $EUID -eq 0 || -z $optional ]] || cannot_build "${missing[*]} are not on this machine"
    local line="$install ${missing[*]}"
    if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
        say "$line"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive $line >/dev/null
    else
        die "not on this machine: ${missing[*]}. As root: $line
On a cluster, load its compiler and MPI first (module load openmpi), then run this again"
    fi
}

mpi_family() { # the MPI that is first in PATH
    if mpicxx --showme:version >/dev/null 2>&1 || [[ $(mpirun --version 2>&1) == *'Open MPI'* ]]; then
        echo openmpi
    else
        echo mpich
    fi
}

works() { # Horovod of this version is there, was built with all that is needed here, and loads against this torch
    "$python" - "$version" "${gpu[0]:-}" 2>/dev/null <<'PY'
import sys
import horovod
if horovod.__version__ != sys.argv[1]:
    sys.exit(1)
import horovod.torch as hvd
sys.exit(not (hvd.mpi_built() and hvd.gloo_built() and (not sys.argv[2] or hvd.nccl_built())))
PY
}

build() { # a wheel into $1
    local work
    work=$(mktemp -d)
    # The release asks for C++14 where torch's headers need C++17: of several -std the last one counts. Debugging
    # symbols would make the wheel twenty times larger. Open MPI's old C++ bindings, gone in version 5, stay out. Headers
    # of GCC 13 and newer no longer include <stdexcept> by the way.
    cat >"$work/c++" <<WRAPPER
#!/bin/sh
exec $compiler -Wl,--as-needed -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX "\$@" -std=c++17 -g0 -include stdexcept
WRAPPER
    # Compiled a few sources at a time, for headers cost most of it: 40 % less work. Only Gloo's clash with each other.
    echo 'set(CMAKE_UNITY_BUILD OFF)' >"$work/one_by_one.cmake"
    cat >"$work/cmake" <<WRAPPER
#!/bin/sh
[ "\$1" = --build ] || set -- -DCMAKE_UNITY_BUILD=ON -DCMAKE_PROJECT_gloo_INCLUDE="$work/one_by_one.cmake" "\$@"
exec $(command -v cmake) "\$@"
WRAPPER
    chmod +x "$work/c++" "$work/cmake"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --no-build-isolation \
        --no-binary horovod --dest "$work" "horovod==$version" ||
        { rm -rf "$work" && cannot_build "the source of Horovod $version could not be fetched; see above"; }
    tar -xf "$work/horovod-$version.tar.gz" -C "$work"
    # Its bundled flatbuffers assigns to a constant, which GCC 14 refuses even where nobody calls it.
    sed -i 's/const size_type count_;/size_type count_;/' \
        "$work/horovod-$version/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
    # CMake 4 refuses the old policy of the bundled Gloo without CMAKE_POLICY_VERSION_MINIMUM.
    env "${gpu[@]:1}" CXX="$work/c++" HOROVOD_CMAKE="$work/cmake" MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-cache-dir --no-build-isolation \
        --wheel-dir "$work/wheel" "$work/horovod-$version" ||
        { rm -rf "$work" && cannot_build "it did not build; see above"; }
    mkdir -p "$1"
    mv "$work"/wheel/horovod-*.whl "$1/"
    rm -rf "$work"
}

torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || die "$python has no torch: install that first"
gpu=() # a name for the key, and the variables of the build
if [[ -z $cpu ]]; then
    choice=$("$python" "$here/horovod_gpu.py") || cannot_build "$choice"
    [[ -z $choice ]] || mapfile -t gpu <<<"$choice"
fi
if ! works; then
    command -v mpicxx mpirun >/dev/null || need_programs
    pip=("$python" -m pip install --quiet --disable-pip-version-check)
    [[ -r $here/../constraints.txt ]] && pip+=(--constraint "$here/../constraints.txt")
    abi=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    kept=${HPCJOBS_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/hpcjobs/wheels}/torch$torch-$abi-$(mpi_family)${gpu[0]:+-${gpu[0]}}
    mkdir -p "$kept"
    exec 9>"$kept/.lock"
    flock 9 # of two that start together, one builds
    if ! compgen -G "$kept/horovod-$version-*.whl" >/dev/null; then
        need_programs
        "$python" -c 'import numpy, packaging, setuptools, wheel' 2>/dev/null || "${pip[@]}" numpy packaging setuptools wheel
        say "building Horovod $version against torch $torch and $(mpi_family): two to three minutes on two cores"
        build "$kept"
    fi
    [[ -z $wheel_only ]] || exit 0
    say "installing $(basename "$(compgen -G "$kept/horovod-$version-*.whl")")"
    "${pip[@]}" --force-reinstall --no-deps "$kept"/horovod-"$version"-*.whl
    "${pip[@]}" "$kept"/horovod-"$version"-*.whl # what Horovod needs beside itself
    works || cannot_build "Horovod $version was installed and does not load: $("$python" -c 'import horovod.torch' 2>&1 | tail -n 1)"
fi
rm -f "$stated"
say "Horovod $version is there, over MPI and Gloo${gpu[0]:+ and NCCL}, for torch $torch"
