#!/bin/bash
# hpcjobs VERSION
# site tu-hpc (/SHIPPED/site_configs/tu-hpc.yaml)
# template /SHIPPED/templates/job.sh.j2
# made by: hpcjobs submit ...
#SBATCH --job-name=train
#SBATCH --partition=compute
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#SBATCH --output=/RUN/logs/%x_%j.out

# shellcheck disable=SC1090,SC1091,SC2016,SC2317,SC2329  # sourced init files; text expanded by each task; functions called by traps
run_dir=/RUN
job_id=$SLURM_JOB_ID
nodes=$SLURM_JOB_NODELIST

# --- state file: written at the start and, by a trap, at every end a script can notice
printf -v started '%(%s)T' -1
cluster=${SLURM_CLUSTER_NAME:-}
caught=''

write_state() { # STATE EXIT_CODE FIRST_FAILURE
    local ended=null # no `date`: a signal to all processes of the job would end it
    [ "$1" = RUNNING ] || printf -v ended '%(%s)T' -1
    printf '{"schema":1,"job_id":"%s","state":"%s","exit_code":%s,"started":%s,"ended":%s,"nodes":"%s","restarts":%s,"first_failure":%s,"cluster":"%s"}\n' \
        "$job_id" "$1" "$2" "$started" "$ended" "$nodes" "${SLURM_RESTART_COUNT:-0}" "$3" "$cluster" >"$run_dir/.state.json" &&
        mv -f -- "$run_dir/.state.json" "$run_dir/state.json"
}

finish() {
    local code=$? state=COMPLETED failure=null rank host
    if [ -s "$run_dir/first_failure" ]; then
        read -r code rank host <"$run_dir/first_failure"
        failure="{\"rank\":$rank,\"host\":\"$host\",\"exit_code\":$code}"
        echo "hpcjobs: first failure: rank $rank on $host, exit code $code" >&2
    fi
    [ "$code" -eq 0 ] || state=FAILED
    [ -z "$caught" ] || state=CANCELLED
    [ -z "${recorder:-}" ] || { kill "$recorder" && wait "$recorder"; } 2>/dev/null
    write_state "$state" "$code" "$failure"
    trap - EXIT
    exit "$code"
}

die() {
    echo "hpcjobs: $(hostname): $*" >&2
    exit 1
}

record_before_kill() { # KillWait after TERM Slurm kills this script; srun may wait longer for a step that has just begun
    local kill_wait
    kill_wait=$(timeout 5 scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
    read -rt "$((${kill_wait:-30} > 8 ? ${kill_wait:-30} - 4 : 4))" <> <(:) # a sleep that leaves no process behind
    write_state CANCELLED 143 null
}

await_step() { # PID: wait for it, handing TERM on; its exit code
    step=$1
    trap 'caught=TERM; kill -TERM "$step" 2>/dev/null; [ -n "${recorder:-}" ] || { record_before_kill & recorder=$!; }' TERM
    # A trapped signal interrupts `wait`: ask again until the step has really ended.
    wait "$step"
    step_code=$?
    while kill -0 "$step" 2>/dev/null; do
        wait "$step"
        step_code=$?
    done
    return "$step_code"
}

trap finish EXIT
trap 'caught=TERM; exit 143' TERM
rm -f -- "$run_dir/first_failure"
write_state RUNNING null null

# --- what srun reads from the environment
# After --export=NONE it would start tasks without this script's environment.
export SLURM_EXPORT_ENV=ALL

# --- software of the site
# What was loaded at login is here in part only; while it counts as loaded, module load does nothing.
unset LOADEDMODULES _LMFILES_ "${!_ModuleTable@}" "${!__MODULES_LM@}"
for init in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    if ! command -v module >/dev/null && [ -r "$init" ]; then . "$init"; fi
done
command -v module >/dev/null || die 'no module command on this node: set module_init in the site file'
module load openmpi || die 'module load openmpi failed'

# --- what every task is told
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$host
# A port that is free on this node, where rank 0 will run; jobs start their search apart from each other.
free_port() { # FROM
    local port=$1
    while grep -qi ":$(printf '%04X' "$port") " /proc/net/tcp /proc/net/tcp6 2>/dev/null; do
        port=$((port + 1))
    done
    echo "$port"
}
MASTER_PORT=$(free_port $((15000 + (10#${job_id//[!0-9]/} * 7 + UID) % 16000)))
export MASTER_ADDR MASTER_PORT
export HPCJOBS_NNODES=$SLURM_JOB_NUM_NODES
export HPCJOBS_NTASKS=$((HPCJOBS_NNODES * 2))
export HPCJOBS_JOB_ID=$job_id HPCJOBS_RUN_DIR=$run_dir HPCJOBS_LAUNCHED_BY='srun --mpi=pmix'
export OMP_NUM_THREADS=1
export HPCJOBS_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export PYTHONUTF8=1
export GREETING='it'"'"'s'
unset TORCHELASTIC_RUN_ID
cd -- /HERE || die 'the working folder is not there on this node'

# --- how a program gets into its image: checked on each node, so that what is missing is named where it is missing
enter=$(
    cat <<'ENTER'
no() {
    echo "hpcjobs: $(hostname):" 'container /HERE/train.sif:' "$*" >&2
    exit 21
}
command -v apptainer >/dev/null || no 'no program apptainer on this node: name its module, or containers.program, in the site file'
image=/HERE/train.sif
[ -r "$image" ] || no "there is no $image, or not for $(id -un)"
[ "$({ stat -Lc %s -- "$image" && head -c 65536 -- "$image"; } | sha256sum | cut -c 1-16)" = 0658f5cb34af5d12 ] ||
    no "$image has changed since this job was submitted: submit it again"
bound=()
see() { # SOURCE TARGET MODE
    [ -r "$1" ] || no "there is no $1 to bind, or not for $(id -un)"
    bound+=(--bind "$1:$2:$3")
}
see /PACKAGE /opt/hpcjobs/hpcjobs ro
see /data /data ro
see /HERE /HERE rw
# Where they are: scratch of the job, and the folder in which Slurm's PMIx waits for its ranks.
for seen in /scratch/"$USER"'/it'"'"'s' "${TMPDIR:-}" "${PMIX_SERVER_TMPDIR:-}" "${PMIX_SYSTEM_TMPDIR:-}"; do
    [[ ! -d $seen || $seen == /tmp* ]] || see "$seen" "$seen" rw
done
# The image's own environment would win over that of the job; nothing in a value is evaluated (--no-eval).
let_in() {
    for seen; do
        [ -z "${!seen+x}" ] || export "APPTAINERENV_$seen=${!seen}"
    done
}
let_in RANK LOCAL_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES \
    "${!MASTER_@}" "${!HPCJOBS_@}" "${!OMP_@}" "${!SLURM_@}" "${!PMI_@}" "${!PMIX_@}" "${!OMPI_@}" "${!PRTE_@}" \
    "${!HOROVOD_@}" "${!NCCL_@}" "${!RCCL_@}" "${!GLOO_@}" "${!UCX_@}" TORCH_CPP_LOG_LEVEL TORCH_DISABLE_SHARE_RDZV_TCP_STORE "${!TORCHELASTIC_@}" "${!GROUP_@}" "${!ROLE_@}" TMPDIR PYTHONUTF8 GREETING
export APPTAINERENV_PYTHONPATH=/opt/hpcjobs
export APPTAINERENV_PYTHONNOUSERSITE=1
unset PYTHONHOME
PATH=/RUN/.fuse:$PATH
exec apptainer --quiet exec --no-eval --no-home --pwd "$PWD" --ipc "${bound[@]}" "$image" "$@"
ENTER
)
# Slurm signals every process of a step. The one that serves the image's files to an ordinary user must not mind: a program
# that saves because it was told to still reads from them. So the runtime finds one that is deaf.
if [ "$UID" -ne 0 ]; then
    mkdir -p /RUN/.fuse
    for seen in squashfuse_ll squashfuse; do
        image=$(command -v "$seen") || continue
        printf '#!/bin/sh\ntrap "" HUP INT TERM USR1 USR2\nexec %s "$@"\n' "$image" >"$run_dir/.$seen"
        chmod 700 "$run_dir/.$seen"
        mv -f -- "$run_dir/.$seen" /RUN/.fuse/"$seen"
    done
fi
bash -c "$enter" enter python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "the image'"'"'s Python is older than 3.10")' </dev/null || {
    [ $? -eq 21 ] || echo "hpcjobs: $(hostname):" 'container /HERE/train.sif cannot be started; why stands above' >&2
    exit 21
}

# --- what the launcher needs
export OMPI_MCA_btl_tcp_if_include=eth0
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}

# --- what each task runs: it publishes its rank, runs the program, records the first failure
task=$(
    cat <<'TASK'
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=2
[ "$((LOCAL_WORLD_SIZE * OMP_NUM_THREADS))" -lt "$(getconf _NPROCESSORS_ONLN)" ] || export OMPI_MCA_mpi_yield_when_idle=1
if [ "${WORLD_SIZE:-}" != "$HPCJOBS_NTASKS" ]; then
    echo "hpcjobs: $(hostname): this task sees a world of ${WORLD_SIZE:-nobody} and not of $HPCJOBS_NTASKS, started by $HPCJOBS_LAUNCHED_BY" >&2
    exit 10
fi
program='' told=''
hand_on() { # SIGNAL: Slurm may tell this shell alone (proctrack/cgroup does)
    told=$1
    [ -z "$program" ] || kill -s "$1" "$program" 2>/dev/null
}
trap 'hand_on TERM' TERM INT # a shell's children in the background do not hear INT
trap 'hand_on HUP' HUP
trap 'hand_on USR1' USR1
trap 'hand_on USR2' USR2
await_program() { # PID: sets `code`
    local again
    program=$1
    [ -z "$told" ] || kill -s "$told" "$program" 2>/dev/null # it came before there was anybody to tell
    wait "$program"
    code=$?
    while [ "$code" -gt 128 ] && kill -0 "$program" 2>/dev/null; do # a signal has ended the waiting
        wait "$program"
        code=$?
    done
    [ "$code" -gt 128 ] || return 0
    trap '' TERM INT HUP USR1 USR2 # for the program, which has ended; the next line must not hear them
    # Of a child that ends as a signal comes bash may forget the code, and would wait for it for ever.
    if ! jobs -rp | grep -qx "$program"; then
        wait "$program" 2>/dev/null
        again=$?
        [ "$again" -eq 127 ] || code=$again # 127: its end was told already
    fi
}
record_failure() { # at once: a rank that fails for want of this one must come second
    [ "$code" -ne 0 ] || return 0
    (set -o noclobber && echo "$code $RANK $(hostname)" >"$HPCJOBS_RUN_DIR/first_failure") 2>/dev/null || return 0
}
"$@" &
await_program $!
record_failure
if [ "$code" -ne 0 ]; then
    echo "hpcjobs: rank $RANK on $(hostname) ended with exit code $code" >&2
fi
exit "$code"
TASK
)

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * 2))" --ntasks-per-node=2 --cpus-per-task=1 --mpi=pmix --kill-on-bad-exit=1 --label bash -c "$task" task bash -c "$enter" enter python3 -u train.py 'two words' </dev/null &
await_step $!
code=$?
exit "$code"
