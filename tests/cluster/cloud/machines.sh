#!/usr/bin/env bash
# machines.sh WORK BASE NAME...: machines of their own, for start-up scripts to run in: each has a Debian root (a layer
# over BASE that is thrown away), a host name, processes and an address 10.99.0.N on one bridge, without a way out.
# All see WORK/shared as /shared. Runs until it is killed; WORK/pids/NAME holds what to enter, WORK/ready says it is up.
set -euo pipefail
# shellcheck source=tools/furnish.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../tools/furnish.sh"

own_cgroups() { # own_cgroups ROOT: each hierarchy as a machine of its own would see it, for Slurm to confine jobs by
    local hierarchy controllers
    mount -t tmpfs tmpfs "$1/sys/fs/cgroup"
    while read -r hierarchy controllers; do
        mkdir -p "$1/sys/fs/cgroup/$hierarchy"
        mount -t cgroup -o "$controllers" cgroup "$1/sys/fs/cgroup/$hierarchy"
    done < <(awk '$3 == "cgroup" && $2 ~ "^/sys/fs/cgroup/(cpuset|cpuacct|devices|freezer|memory|systemd)$" { n = split($2, p, "/"); print p[n], p[n] == "systemd" ? "none,name=systemd" : p[n] }' /proc/mounts)
    [[ ! -e /sys/fs/cgroup/cgroup.controllers ]] || mount -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
}

enter_cgroups() { # enter_cgroups NAME: this process, in a group of its own of every hierarchy
    local hierarchy
    for hierarchy in /sys/fs/cgroup/{cpuset,cpuacct,devices,freezer,memory,systemd} /sys/fs/cgroup; do
        [[ -e $hierarchy/cgroup.procs ]] || continue
        mkdir -p "$hierarchy/hpcjobs-$1"
        [[ ! -e $hierarchy/cpuset.cpus ]] || for file in cpus mems; do
            cat "$hierarchy/cpuset.$file" >"$hierarchy/hpcjobs-$1/cpuset.$file"
        done
        echo $BASHPID >"$hierarchy/hpcjobs-$1/cgroup.procs"
    done
}

machine() { # machine WORK BASE NAME: runs inside the new namespaces
    local work=$1 base=$2 name=$3 layers=$1/layers/$3 root=$1/layers/$3/root
    hostname "$name"
    mkdir -p "$layers"
    mount -t tmpfs tmpfs "$layers"
    mkdir -p "$layers/upper" "$layers/work" "$root"
    mount -t overlay overlay -o "lowerdir=$base,upperdir=$layers/upper,workdir=$layers/work" "$root"
    furnish "$root"
    mount -t tmpfs tmpfs "$root/tmp"
    own_cgroups "$root"
    mkdir -p "$root/shared"
    mount --bind "$work/shared" "$root/shared"
    printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
    : >"$root/etc/resolv.conf"
    trap '' CHLD # the machine's first process: who ends here is gone, not for ever a zombie that a service waits for
    exec sleep infinity
}

if [[ $1 == --inside ]]; then
    machine "${@:2}"
fi
work=$1 base=$2 self=$(realpath "$0")
shift 2
mkdir -p "$work/pids" "$work/shared" /run/netns
mount -t tmpfs tmpfs /run/netns
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
number=10
for name in "$@"; do
    number=$((number + 1))
    ip netns add "$name"
    ip link add "port$number" type veth peer name eth0 netns "$name"
    ip link set "port$number" master bridge0 up
    ip -n "$name" link set lo up
    ip -n "$name" address add "10.99.0.$number/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via 10.99.0.1
    (
        enter_cgroups "$name"
        exec nsenter --net="/run/netns/$name" unshare --mount --uts --ipc --pid --cgroup --fork --kill-child \
            --propagation private bash "$self" --inside "$work" "$base" "$name"
    ) &
    until pgrep -P $! -x sleep >"$work/pids/$name"; do
        kill -0 $! # a machine that ends ends this script, which says why
        sleep 0.05
    done
done
touch "$work/ready"
wait
