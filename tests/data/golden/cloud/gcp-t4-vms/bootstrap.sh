#!/usr/bin/env bash
# Makes this machine a node of gcp-t4. Runs at every start of the machine, as root; what is done already it leaves.
# Log: /var/log/hpcjobs-bootstrap.log. `bootstrap.sh bake` only installs: for an image of your own, whose machines start
# in seconds. Told by who starts it:
#   HPCJOBS_ROLE      head or worker
#   HPCJOBS_USER      the cluster's one user
#   HPCJOBS_SSH_KEYS  public keys of those who may log in, one a line
#   HPCJOBS_SHARED    what is mounted as /shared: HOST:/PATH, or the tag of a virtiofs; empty: a disk of this machine
#   HPCJOBS_NFS       version of NFS that HOST speaks: 4.1 (the default), or 3
set -euo pipefail
umask 022

readonly role=${HPCJOBS_ROLE:?head or worker} user=${HPCJOBS_USER:?} keys=${HPCJOBS_SSH_KEYS?} source=${HPCJOBS_SHARED?}
readonly nfs=${HPCJOBS_NFS:-4.1}
readonly cluster=gcp-t4 mount=/shared venv=/opt/hpcjobs/venv slots=1
readonly patience_s=1800 # the head may need its time: it is what workers wait for
readonly inside=$mount/.cluster home=$mount/home/$user uid=2000
readonly wheel=hpcjobs-VERSION-py3-none-any.whl wheel_sha256=SHA256-OF-THE-WHEEL wheel_extras='[train,digits,mpi]'
packages=(ca-certificates curl gcc libopenmpi-dev nfs-common openmpi-bin openssh-client openssh-server procps python3-dev python3-venv slurm-client sudo slurm-client slurm-wlm-basic-plugins munge libpmix2 libpmix-dev iproute2)
worker_packages=(slurmd)
head_packages=(slurmctld slurmdbd slurm-wlm-mysql-plugin mariadb-server nfs-kernel-server)
python_packages=()
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

say() { printf '%s %s: %s\n' "$(date -u +%FT%TZ)" "$(hostname -s)" "$*"; }
die() { say "error: $*" && exit 1; }

is_head() { [[ $role == head ]]; }

await() { # await SECONDS WHAT COMMAND...: until the command succeeds
    local until=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        ((SECONDS < until)) || die "waited in vain for $what"
        sleep 2
    done
}

# Writes standard input to a file in one step, when it differs.
put() { # put PATH MODE [OWNER]
    local new
    mkdir -p "$(dirname "$1")"
    new=$(mktemp "$(dirname "$1")/.${1##*/}.XXXXXX")
    cat >"$new"
    chmod "$2" "$new"
    chown "${3:-root:root}" "$new"
    if cmp -s "$new" "$1"; then rm "$new"; else mv "$new" "$1"; fi
}

with_systemd() { [[ -d /run/systemd/system ]]; }

ended() { # ended SERVICE: nothing of it runs any more
    case $1 in munge) set -- munged ;; mariadb) set -- mariadbd ;; esac
    ! pidof "$1" >/dev/null
}

serve() { # serve NAME...: runs services now and at every start; a restart of Slurm's loses no job
    local name
    for name in "$@"; do
        if with_systemd; then
            systemctl enable --quiet "$name"
            systemctl restart "$name"
        else
            service "$name" stop || true # of one that takes long it says that it failed
            await 60 "the end of $name" ended "$name"
            service "$name" start
        fi
    done
}

install_packages() { # install_packages NAME...: those that are missing
    local name missing=()
    for name in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
    done
    [[ -n ${missing[*]} ]] || return 0
    say "installing ${missing[*]}"
    await 600 "the package lists" apt-get -qq update
    apt-get -qq install -y --no-install-recommends -o DPkg::Lock::Timeout=600 "${missing[@]}" >/dev/null
}

# The image should bring NVIDIA's driver; where it does not, Google's installer builds one. It may restart the machine:
# this script then runs again.
install_driver() {
    ! is_head || return 0
    nvidia-smi >/dev/null 2>&1 && return 0
    local installer=/opt/google/cuda_installer.pyz
    mkdir -p /opt/google
    curl -fsSL https://storage.googleapis.com/compute-gpu-installation-us/installer/latest/cuda_installer.pyz -o "$installer"
    python3 "$installer" install_driver
    nvidia-smi || die "no GPU driver: use an image that has one"
}

# Homes, run folders and what the machines tell each other. By fstab, so that it is there at every start of the machine,
# and slurmd waits for it.
mount_shared() {
    mkdir -p "$mount"
    if [[ -z $source ]]; then
        export_disk
    elif [[ $source != *:* ]]; then
        write_fstab "$source" "$mount" virtiofs defaults,nofail
    elif [[ $nfs == 3 ]]; then # its locks need a service that calls back from outside the cluster: they stay local
        write_fstab "$source" "$mount" nfs vers=3,nolock,hard,noatime,_netdev,nofail
    else
        write_fstab "$source" "$mount" nfs "vers=$nfs,hard,noatime,nconnect=4,_netdev,nofail"
    fi
    await "$patience_s" "${source:-the disk}" mount_listed "$mount"
    put /etc/systemd/system/slurmd.service.d/hpcjobs.conf 644 <<TEXT
[Unit]
RequiresMountsFor=$mount
TEXT
    ! with_systemd || systemctl daemon-reload
    say "mounted $mount"
}

mount_listed() { mountpoint -q "$1" || mount "$1"; } # mount_listed FOLDER: as fstab says

write_fstab() { # write_fstab WHAT FOLDER TYPE OPTIONS: the folder's one line
    { awk -v folder="$2" '$2 != folder' /etc/fstab && printf '%s %s %s %s 0 0\n' "$@"; } | put /etc/fstab 644
}

export_disk() { # only the head has the disk
    local disk
    disk=$(compgen -G '/dev/disk/by-id/*-shared' | head -n 1) || die "no disk for $mount"
    blkid "$disk" >/dev/null || mkfs.ext4 -q -L shared "$disk"
    mkdir -p /srv/shared
    write_fstab "$disk" /srv/shared ext4 defaults,nofail
    write_fstab /srv/shared "$mount" none bind,nofail,x-systemd.requires-mounts-for=/srv/shared
    mount_listed /srv/shared
    # Only machines of the cluster reach the port. root is root, for munge's key; all of them are one person's.
    put /etc/exports.d/hpcjobs.exports 644 <<<"/srv *(ro,fsid=0,no_subtree_check) /srv/shared *(rw,no_root_squash,no_subtree_check)"
    serve nfs-kernel-server
}

# One user, the same number everywhere, home on the shared filesystem, ssh from node to node without questions.
make_user() {
    getent group "$user" >/dev/null || groupadd --gid "$uid" "$user"
    getent passwd "$user" >/dev/null || useradd --uid "$uid" --gid "$uid" --home-dir "$home" --no-create-home --shell /bin/bash "$user"
    [[ $(getent passwd "$user") == *":$home:"* ]] || die "user $user exists and is someone else"
    printf '%s ALL=(ALL) NOPASSWD:ALL\n' "$user" | put /etc/sudoers.d/hpcjobs 440
    ! is_head || make_home
    await "$patience_s" "the head" test -e "$home/.ssh/authorized_keys"
}

make_home() {
    install -d -m 755 "$mount/home"
    install -d -m 700 -o "$user" -g "$user" "$home" "$home/.ssh"
    install -d -m 755 -o "$user" -g "$user" "$mount/$user"
    [[ -e $home/.ssh/id_ed25519 ]] ||
        runuser -u "$user" -- ssh-keygen -q -t ed25519 -N '' -C "inside $cluster" -f "$home/.ssh/id_ed25519"
    put "$home/.ssh/config" 600 "$user:$user" <<TEXT
Host $cluster-*
    StrictHostKeyChecking accept-new
TEXT
    put "$home/.bashrc" 644 "$user:$user" <<TEXT
PATH=$venv/bin:\$PATH
export HPCJOBS_SITE=$cluster
TEXT
    { printf '%s\n' "$keys" && cat "$home/.ssh/id_ed25519.pub"; } | put "$home/.ssh/authorized_keys" 600 "$user:$user"
}

# Every machine says who it is in a folder that all see; each makes its host names and MPI's host list of that.
join_cluster() {
    local address
    address=$(ip -4 -o route get 192.0.2.1 | sed -E 's/.* src ([0-9.]+).*/\1/')
    install -d -m 700 "$inside"
    printf '%s %s %s %s\n' "$address" "$(hostname -s)" "$role" "$slots" | put "$inside/nodes/$(hostname -s)" 644
    put /usr/local/sbin/hpcjobs-nodes 755 <<'SCRIPT'
#!/usr/bin/env bash
# Host names of gcp-t4 in /etc/hosts, and MPI's host list, of what the machines said in /shared/.cluster/nodes.
set -euo pipefail
readonly nodes=/shared/.cluster/nodes

names() {
    sort -V -k 2 "$nodes"/* | awk '$1 ~ /^[0-9.]+$/ && NF == 4 { print $1, $2 }'
}

exec 9>/run/lock/hpcjobs-nodes
flock 9
new=$(sed '/^# hpcjobs: nodes$/,/^# hpcjobs: end$/d' /etc/hosts && echo '# hpcjobs: nodes' && names && echo '# hpcjobs: end')
if [[ $new != "$(cat /etc/hosts)" ]]; then
    printf '%s\n' "$new" >/etc/hosts # in place: it may be mounted
    if pgrep -x slurmctld >/dev/null; then
        scontrol reconfigure
    fi
fi
if [[ -e $nodes/$(hostname -s) ]] && grep -q ' head ' "$nodes/$(hostname -s)"; then
    sort -V -k 2 "$nodes"/* | awk '$3 == "worker" { print $2 " slots=" $4 }' >/shared/.hosts.new
    mv /shared/.hosts.new /shared/hosts
fi
SCRIPT
    await "$patience_s" "the head" grep -qs ' head ' "$inside"/nodes/*
    /usr/local/sbin/hpcjobs-nodes
    with_systemd || return 0
    put /etc/systemd/system/hpcjobs-nodes.service 644 <<'TEXT'
[Unit]
Description=Host names of the cluster's nodes
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/hpcjobs-nodes
TEXT
    put /etc/systemd/system/hpcjobs-nodes.timer 644 <<'TEXT'
[Unit]
Description=Host names of the cluster's nodes, every minute
[Timer]
OnActiveSec=20s
OnUnitActiveSec=1min
[Install]
WantedBy=timers.target
TEXT
    systemctl daemon-reload
    systemctl enable --quiet --now hpcjobs-nodes.timer
}

# hpcjobs comes as the wheel that the cluster was made with, and from nowhere else: its name on a package index may be
# anybody's. Who made the cluster copies it into the user's home, or beside this script.
find_wheel() { # into the folder that only root reads; fails until it is there with the right content
    local path
    for path in "$inside/$wheel" "$home/$wheel" "$(dirname "${BASH_SOURCE[0]}")/$wheel"; do
        [[ -e $path ]] || continue
        if [[ $path != "$inside/$wheel" ]]; then
            mkdir -p "$inside"
            put "$inside/$wheel" 644 <"$path"
        fi
        if printf '%s  %s\n' "$wheel_sha256" "$inside/$wheel" | sha256sum --check --status; then
            return
        fi
        say "$path is not the wheel that this cluster was made with: it is left out"
        rm -f -- "$inside/$wheel"
    done
    return 1
}

install_python() {
    local done="$venv/.installed" list="${python_packages[*]} $wheel_sha256" pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
    if [[ $venv == "$mount"/* ]] && ! is_head; then # one for all: the head makes it
        await "$patience_s" "$done" grep -qsxF "$list" "$done"
        return
    fi
    [[ $(cat "$done" 2>/dev/null) != "$list" ]] || return 0
    [[ -z $wheel ]] || await "$patience_s" "$wheel: copy it into the home of $user on $cluster-head" find_wheel
    say "installing $wheel ${python_packages[*]} into $venv"
    python3 -m venv "$venv"
    if [[ -n $wheel ]]; then
        "${pip[@]}" --force-reinstall --no-deps "$inside/$wheel"
        "${pip[@]}" "$inside/$wheel$wheel_extras"
    fi
    [[ -z ${python_packages[*]} ]] || "${pip[@]}" --upgrade "${python_packages[@]}"
    printf '%s\n' "$list" >"$done"
}

# Minutes of compiling: jobs that need no Horovod run meanwhile. The first node builds a wheel, the others install it.
install_horovod() {
    local script
    if [[ $venv == "$mount"/* ]]; then
        [[ $(hostname -s) == "$cluster-1" ]] || return 0 # one environment for all
    else
        ! is_head || return 0
    fi
    script=$(compgen -G "$venv/lib/python3*/site-packages/hpcjobs/_data/containers/install_horovod.sh") ||
        die "hpcjobs is not in $venv: no Horovod"
    HPCJOBS_WHEELS=$inside/wheels bash "$script" "$venv/bin/python"
}

# The user's copy of the site, with the network interface that this machine really has.
write_site() {
    local interface
    interface=$(ip -4 -o route get 192.0.2.1 | sed -E 's/.* dev ([^ ]+).*/\1/')
    install -d -m 700 -o "$user" -g "$user" "$home/.config" "$home/.config/hpcjobs" "$home/.config/hpcjobs/site_configs"
    sed -E "s/^interface: .*/interface: $interface/; s/^( +NCCL_SOCKET_IFNAME:) .*/\1 $interface/" <<'SITE' |
# Cloud nodes as `n1-standard-8` + one T4 each (us-central1-a), running Slurm.
description: GCP n1-standard-8 nodes with one NVIDIA T4 each
partitions:
  t4:
    default: true
    nodes: 2
    node: {cpus: 8, mem: 28G, gpus: 1, gpu_model: t4}
    max_time: 1-00:00:00
    defaults: {gpus_per_node: 1}
defaults:
  time: 2h
gpu_request: gres
launchers: [srun, torchrun, mpirun, horovod-gloo, horovodrun]
mpi: pmix
interface: eth0
env:
  NCCL_DEBUG: INFO
environment: {venv: /opt/hpcjobs/venv}
run_root: /shared/$USER/runs
node_local: [/tmp, /var/tmp, /dev/shm]
login: login.gcp-t4.example
prices: {node_hour: 0.73, currency: USD}
watts: {cpu: 7.0, gpu: 70.0}
# What `hpcjobs cloud` builds: docs/cloud.md. Project, keys and networks are said by whoever builds it.
cloud:
  provider: gcp
  region: us-central1
  zone: us-central1-a
  machine: n1-standard-8
  gpu: {model: t4, count: 1}
  nodes: {min: 1, max: 2}
  head: {machine: e2-standard-4, hour: 0.13}
  disk: {size: 100G}
  shared: {kind: nfs, mount: /shared, size: 200G}
  horovod: true
SITE
        put "$home/.config/hpcjobs/site_configs/$cluster.yaml" 644 "$user:$user"
}

write_cgroup_setting() { # for cgroup v2 without systemd, which would make the group that slurmd makes its own in
    local group root=/sys/fs/cgroup
    ! with_systemd && [[ -e $root/cgroup.controllers ]] || return 0
    mkdir -p "$root/system.slice"
    for group in "$root" "$root/system.slice"; do
        echo '+cpuset +cpu +memory' >"$group/cgroup.subtree_control"
    done
    echo IgnoreSystemd=yes
}

write_slurm() {
    put /etc/slurm/slurm.conf 644 <<'TEXT'
ClusterName=gcp-t4
SlurmctldHost=gcp-t4-head
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
# A node that was taken away, or is still starting, comes back by itself.
ReturnToService=2
ResumeTimeout=1800
SlurmdTimeout=120
# What the machine type promises, not what is left of it beside the system.
SlurmdParameters=config_overrides
# Each job has the cores, memory and GPUs that it requested, and no more: cgroup.conf.
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
PrologFlags=Contain
MpiDefault=pmix
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherFrequency=10
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=gcp-t4-head
AccountingStorageEnforce=associations
JobRequeue=1
EnforcePartLimits=ALL
GresTypes=gpu
AccountingStorageTRES=gres/gpu
NodeName=gcp-t4-1 NodeAddr=gcp-t4-1 NodeHostname=gcp-t4-1 Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=28672 TmpDisk=20480 State=UNKNOWN Gres=gpu:t4:1
NodeName=gcp-t4-2 NodeAddr=gcp-t4-2 NodeHostname=gcp-t4-2 Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=28672 TmpDisk=20480 State=UNKNOWN Gres=gpu:t4:1
PartitionName=t4 Nodes=gcp-t4-1,gcp-t4-2 State=UP Default=YES MaxTime=1-00:00:00 DefMemPerCPU=3584
TEXT
    { cat <<'TEXT' && write_cgroup_setting; } | put /etc/slurm/cgroup.conf 644
# cgroup v2 on the images that are rented; v1 where a kernel has only that.
CgroupPlugin=autodetect
ConstrainCores=yes
ConstrainDevices=yes
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
TEXT
    put /etc/slurm/gres.conf 644 <<'TEXT'
NodeName=gcp-t4-1,gcp-t4-2 Name=gpu Type=t4 File=/dev/nvidia0
TEXT
    install -d -m 755 /var/spool/slurmctld /var/spool/slurmd
    if is_head && [[ ! -e $inside/munge.key ]]; then
        head -c 1024 /dev/urandom | put "$inside/munge.key" 400
    fi
    await "$patience_s" "munge's key" test -e "$inside/munge.key"
    put /etc/munge/munge.key 400 munge:munge <"$inside/munge.key"
}

start_accounting() {
    local secret=/etc/slurm/slurmdbd.conf password
    serve mariadb
    if [[ ! -e $secret ]]; then
        password=$(head -c 24 /dev/urandom | base64 | tr -d '/+=')
        mariadb <<SQL
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE OR REPLACE USER 'slurm'@'localhost' IDENTIFIED BY '$password';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';
SQL
        put "$secret" 600 <<TEXT
AuthType=auth/munge
DbdHost=$cluster-head
SlurmUser=root
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=slurm
StoragePass=$password
StorageLoc=slurm_acct_db
TEXT
    fi
    serve slurmdbd
    await 300 slurmdbd sacctmgr --noheader show cluster
    # Each of these may be there.
    sacctmgr -in add cluster "$cluster" >/dev/null || true
    sacctmgr -in add account users description=users organization="$cluster" >/dev/null || true
    sacctmgr -in add user "$user" account=users >/dev/null || true
}

controller_answers() { scontrol ping | grep -q ' UP$'; }
slurmd_answers() { scontrol show slurmd >/dev/null 2>&1; }

start_slurm() {
    serve munge
    if is_head; then
        start_accounting
        serve slurmctld
        await 300 slurmctld controller_answers
    else
        serve slurmd
        await 300 slurmd slurmd_answers
    fi
}

bake() { # one image for either role
    install_packages "${packages[@]}" "${head_packages[@]}" "${worker_packages[@]}"
    [[ $venv == "$mount"/* ]] || install_python
}

main() {
    say "start: $role of $cluster"
    if is_head; then
        install_packages "${packages[@]}" "${head_packages[@]}"
    else
        install_packages "${packages[@]}" "${worker_packages[@]}"
    fi
    install_driver
    mount_shared
    make_user
    join_cluster
    install_python
    ! is_head || write_site
    write_slurm
    start_slurm
    ! is_head || install -m 644 -o "$user" -g "$user" /dev/null "$home/.cluster-ready"
    # Not in an `if`: errors end the function only outside of one.
    (install_horovod) &
    wait $! || say "error: no Horovod on this machine; jobs that need none run"
    say "ready"
}

exec 9>/run/lock/hpcjobs-bootstrap
flock 9 # of two that start together the second one finds everything done; the services must not inherit it
"${1:-main}" 9>&- 2>&1 | tee -a /var/log/hpcjobs-bootstrap.log
