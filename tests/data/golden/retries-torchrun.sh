#!/bin/bash
# hpcjobs VERSION
# site tu-hpc (/SHIPPED/site_configs/tu-hpc.yaml)
# template /SHIPPED/templates/job.sh.j2
# made by: hpcjobs submit ...
#SBATCH --job-name=true
#SBATCH --partition=compute
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=/RUN/logs/%x_%j.out

# shellcheck disable=SC1090,SC1091,SC2016,SC2317,SC2329  # sourced init files; text expanded by each task; functions called by traps
run_dir=/RUN
job_id=$SLURM_JOB_ID
nodes=$SLURM_JOB_NODELIST

# --- state file: written at the start and, by a trap, at every end a script can notice
started=$(date +%s)
caught=''
trap : USR1

write_state() { # STATE EXIT_CODE ENDED FIRST_FAILURE
    printf '{"schema":1,"job_id":"%s","state":"%s","exit_code":%s,"started":%s,"ended":%s,"nodes":"%s","restarts":%s,"first_failure":%s,"cluster":"%s"}\n' \
        "$job_id" "$1" "$2" "$started" "$3" "$nodes" "${SLURM_RESTART_COUNT:-0}" "$4" \
        "${SLURM_CLUSTER_NAME:-}" >"$run_dir/.state.json" &&
        mv -f -- "$run_dir/.state.json" "$run_dir/state.json"
}


# --- further attempts: why an attempt of this job ended, and whether another one follows (docs/reliability.md)
control=$run_dir/control
history=$run_dir/attempts.jsonl
mkdir -p -- "$control"
touch -- "$history"
declare -A budget=([timeout]=1000000000 [preempt]=1000000000 [node]=3 [error]=0)
asked=''

number() { # FILE: the whole number that it holds, 0 without one
    local word=''
    [ -r "$1" ] && read -r word <"$1"
    [[ $word =~ ^[0-9]{1,18}$ ]] && echo "$((10#$word))" || echo 0
}

signal_before() { # seconds ahead of the time limit at which the step is told
    local told
    told=$(number "$control/signal-before") # by the program, from what it measured
    [ "$told" -gt 0 ] || told=$(((deadline - started) / 4 < 300 ? (deadline - started) / 4 : 300))
    echo "$told"
}

watch_the_clock() { # nobody else knows when it is time: Slurm's own warning is up to a minute early
    local left never
    exec {never}<> <(:) # to wait on without a process of its own, which would outlive this one
    while left=$((deadline - $(date +%s) - $(signal_before))) && [ "$left" -gt 0 ]; do
        read -rt "$((left < 15 ? left : 15))" -u "$never" _
    done
    kill -USR1 $$
}

time_to_save() { # on USR1: from the clock, from Slurm ahead of the limit, or from Slurm ahead of a preemption
    local left=$((deadline - $(date +%s)))
    if [ "$left" -le "$(signal_before)" ]; then
        asked=timeout
    elif [ "$left" -le 365 ]; then
        return # Slurm's word about the limit: the clock's is to come
    else
        asked=preempt
    fi
    [ -z "${step:-}" ] || kill -USR1 "$step"
}

reason() { # EXIT_CODE: what ended this attempt; empty: Slurm takes the job away, and knows why
    local late=''
    [ "$(date +%s)" -lt "$((deadline - 2))" ] || late=yes
    if [ -s "$control/requeue" ]; then
        if [ "$asked" = timeout ] || [ -n "$late" ]; then echo timeout; elif [ -z "$caught" ]; then echo preempt; fi
    elif [ "$1" -eq 0 ] && [ -e "$control/completed" ]; then # a step that Slurm has ended gives 0 too
        echo completed
    elif [ "$1" -eq 0 ] || [ -n "$caught" ]; then
        [ -z "$late" ] || echo timeout
    else
        case $1 in
            11 | 18 | 19 | 137) echo node ;; # no rendezvous, a rank lost, all at a standstill, killed
            138 | 143) echo preempt ;;       # told to end, and not listening
            *) echo error ;;
        esac
    fi
}

vanished() { # JOB_ID: what ended an attempt that left no word of its own, as the accounting has it
    local states
    states=$(sacct --allocations --duplicates --noheader --parsable2 --format=State --jobs="$1" 2>/dev/null)
    case $(grep -vE '^(RUNNING|PENDING|COMPLETING)' <<<"$states" | tail -n 1) in
        NODE_FAIL* | BOOT_FAIL*) echo node ;;
        TIMEOUT*) echo timeout ;;
        *) echo preempt ;;
    esac
}

judge() { # WHY: sets `decision` to requeued, or to why no other attempt follows
    local spent idle=0 patience=3 before=0 kept
    spent=$(grep -c "\"cause\":\"$1\"" "$history")
    while read -r kept; do
        [ "$kept" -gt "$before" ] && idle=0 || idle=$((idle + 1))
        before=$kept
    done < <(sed -n 's/.*"saved":\([0-9]*\).*/\1/p' "$history" && echo "$saved")
    [ "$1" != timeout ] || patience=1
    if [ "$1" = completed ]; then
        decision=completed
    elif [ "$spent" -ge "${budget[$1]}" ]; then
        decision="ended: the budget $1=${budget[$1]} is spent"
    elif [ "$idle" -ge "$patience" ]; then
        decision="ended: no progress, $saved is still all that is saved"
    else
        decision=requeued
    fi
}

remember() { # JOB_ID STARTED ENDED NODES EXIT_CODE WHY: one line of the history
    printf '{"job_id":"%s","started":%s,"ended":%s,"nodes":"%s","exit_code":%s,"cause":"%s","steps":%s,"saved":%s,"decision":"%s"}\n' \
        "$1" "$2" "$3" "$4" "$5" "$6" "$steps" "$saved" "${decision//[\"\\]/}" >>"$history"
    rm -f -- "$control/running"
    echo "hpcjobs: attempt $(wc -l <"$history"): $6 at step $steps, saved up to $saved; $decision" >&2
}

count_steps() {
    saved=$(number "$control/progress")
    steps=$(number "$control/steps")
    [ "$steps" -ge "$saved" ] || steps=$saved
}

judge_the_vanished() { # the attempt before this one, if it left no word
    local earlier begun before why
    [ -s "$control/running" ] || return
    read -r earlier begun before <"$control/running"
    why=$(vanished "$earlier")
    count_steps
    judge "$why"
    [ "$decision" != requeued ] || decision='requeued by Slurm'
    remember "$earlier" "$begun" null "$before" null "$why"
    case $decision in ended*) die "$decision" ;; esac
}

judge_this() { # EXIT_CODE
    local why
    why=$(reason "$1")
    if [ -z "$why" ]; then
        code=143 state=CANCELLED
        return 0
    fi
    count_steps
    judge "$why"
    remember "$job_id" "$started" "$(date +%s)" "$nodes" "$1" "$why"
    case $decision in
        completed) return 0 ;;
        requeued) state=REQUEUED ;;
        *) state=FAILED ;;
    esac
    [ "$code" -ne 0 ] || code=85
}

as_on_login() { # COMMAND...: without what Slurm has put into this job's environment
    (
        for name in "${!SLURM_@}" "${!SBATCH_@}"; do
            case $name in SLURM_CONF | SLURM_CLUSTERS) ;; *) unset "$name" ;; esac
        done
        "$@"
    )
}

do_without() { # sets `left_out` to the nodes that the next start avoids: what it avoids already, and who failed this one
    local suspects already
    left_out=''
    [ -s "$control/suspects" ] || return 0
    suspects=$(cut -d . -f 1 -- "$control/suspects" | sort -u | paste -sd ,)
    already=$(scontrol show job --oneliner "$job_id" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
    [ "$already" = '(null)' ] || suspects="$already,$suspects"
    if as_on_login sbatch --test-only --exclude="$suspects" "$run_dir/job.sh" 2>/dev/null; then
        left_out=$suspects
        echo "hpcjobs: the next start does without $left_out" >&2
    else
        echo "hpcjobs: too few nodes without $suspects: the next start may get them again" >&2
    fi
}

submit_again() { # where no job may be requeued: another one, after this one, in the same run folder
    local log
    log=$(readlink /proc/$$/fd/1)
    as_on_login sbatch --parsable --dependency="afterany:$job_id" --output="${log//%/%%}" \
        ${left_out:+--exclude="$left_out"} "$run_dir/job.sh" 2>&1
}

put_back() { # the host's own shell does it: in a container there is no scontrol
    local said left_out
    trap '' TERM # Slurm ends this script in the course of it
    do_without
    if said=$(scontrol requeue "$job_id" 2>&1); then
        [ -z "$left_out" ] || scontrol update JobId="$job_id" ExcNodeList="$left_out"
        return 0 # said: a bare return within a trap gives the code that the script ended with
    elif said="$said; $(submit_again)"; then
        said=${said##*; }
        echo "${said%%;*}" >"$control/continued"
        sed -i "\$s/\"decision\":\"requeued\"/\"decision\":\"resubmitted as ${said%%;*}\"/" "$history"
        echo "hpcjobs: requeue is not allowed here; goes on as job ${said%%;*}" >&2
    else
        said=$(tr -d '"\\/&\n' <<<"$said")
        sed -i "\$s/\"decision\":\"requeued\"/\"decision\":\"ended: $said\"/" "$history"
        echo "hpcjobs: not requeued: $said" >&2
        return 1
    fi
}

finish() {
    local code=$? state=COMPLETED failure=null rank host
    if [ -s "$run_dir/first_failure" ] && [ "$code" -ne 0 ]; then
        read -r code rank host <"$run_dir/first_failure"
        failure="{\"rank\":$rank,\"host\":\"$host\",\"exit_code\":$code}"
        echo "hpcjobs: first failure: rank $rank on $host, exit code $code" >&2
    fi
    [ "$code" -eq 0 ] || state=FAILED
    [ -z "$caught" ] || state=CANCELLED
    judge_this "$code"
    write_state "$state" "$code" "$(date +%s)" "$failure"
    if [ "$state" = REQUEUED ] && ! put_back; then
        code=85
        write_state FAILED "$code" "$(date +%s)" "$failure"
    fi
    trap - EXIT
    exit "$code"
}

die() {
    echo "hpcjobs: $(hostname): $*" >&2
    exit 1
}

await_step() { # PID: wait for it, handing TERM on; its exit code
    step=$1
    trap 'caught=TERM' TERM # Slurm tells the step itself; srun, told too, would not let it save
    trap time_to_save USR1
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
rm -f -- "$control/requeue" "$control/completed"
judge_the_vanished
echo "$job_id $started $nodes" >"$control/running"
deadline=$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$job_id" --format=%e | head -n 1)
[[ $deadline =~ ^[0-9]+$ ]] && export HPCJOBS_DEADLINE=$deadline || deadline=$((started + 10 ** 9))
export HPCJOBS_CONTROL_DIR=$control
write_state RUNNING null null null

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
command -v conda >/dev/null || die 'no conda on this node: set environment.conda_init'
eval "$(conda shell.bash hook)"
conda activate hvd-cpu || die 'conda environment hvd-cpu cannot be activated'

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
export HPCJOBS_JOB_ID=$job_id HPCJOBS_RUN_DIR=$run_dir HPCJOBS_LAUNCHED_BY=torchrun
export OMP_NUM_THREADS=1
export HPCJOBS_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export PYTHONUTF8=1
unset TORCHELASTIC_RUN_ID
cd -- /HERE || die 'the working folder is not there on this node'

# --- what each task runs: it publishes its rank, runs the program, records the first failure
task=$(
    cat <<'TASK'
export NODE_RANK=$GROUP_RANK
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
trap 'told=USR1; kill -USR1 "$program" 2>/dev/null' USR2 # from the agent's shell, since this one was born deaf to USR1
echo $$ >"$HPCJOBS_CONTROL_DIR/ranks-$(hostname)/$LOCAL_RANK"
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
    [ "$code" -ne 0 ] || [ "$RANK" -ne 0 ] || echo "$code" >"$HPCJOBS_CONTROL_DIR/completed"
    # Saved, and to be started again: no failure, nor anything that an elastic agent should restart.
    [ "$code" -ne 85 ] || code=0
    [ "$code" -ne 0 ] || return 0
    (set -o noclobber && echo "$code $RANK $(hostname)" >"$HPCJOBS_RUN_DIR/first_failure") 2>/dev/null || return 0
    [ "$code" -ne 137 ] || hostname >>"$HPCJOBS_CONTROL_DIR/suspects"
}
# The agent restarts ranks whatever ended them; a program's own error would only come again.
if [ "${TORCHELASTIC_RESTART_COUNT:-0}" -gt 0 ] && read -r code _ <"$HPCJOBS_RUN_DIR/first_failure"; then
    case $code in
        11 | 18 | 19 | 137) rm -f -- "$HPCJOBS_RUN_DIR/first_failure" ;;
        *) exit "$code" ;;
    esac
fi 2>/dev/null
# A signal for the whole task must not take the one away who writes its last lines.
# On a full disk it is begun anew: the program must not meet a broken pipe.
exec {labelled}> >(trap '' TERM INT HUP USR1 USR2 && until sed -u "s/^/$RANK: /"; do sleep 1; done)
label=$!
"$@" >&"$labelled" 2>&1 &
await_program $!
record_failure
exec {labelled}>&-
# The last lines are on their way; a process the program left behind may hold the pipe open for ever.
for _ in {1..30}; do kill -0 "$label" 2>/dev/null && sleep 0.1 || break; done
if [ "$code" -ne 0 ]; then
    echo "hpcjobs: rank $RANK on $(hostname) ended with exit code $code" >&2
fi
exit "$code"
TASK
)
agent=$(
    cat <<'AGENT'
node_addr=$(hostname)
# The ranks are to save and leave first, and not the agent; Slurm may signal this shell alone (proctrack/cgroup does).
ranks=$HPCJOBS_CONTROL_DIR/ranks-$(hostname)
rm -rf -- "$ranks" && mkdir -- "$ranks"
program='' told=''
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
trap 'cat "$ranks"/* 2>/dev/null | xargs -r kill -USR2 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$program" 2>/dev/null' TERM
(trap "" USR1 && exec python -m torch.distributed.run --nnodes="$HPCJOBS_NNODES" --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id="$HPCJOBS_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-conf="is_host=$(( ${SLURM_NODEID:-0} == 0 ))" --local-addr="$node_addr" --max-restarts=3 --no-python "${@//\$/\$\$}") &
await_program $!
exit "$code"
AGENT
)

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * 1))" --ntasks-per-node=1 --cpus-per-task=2 --mpi=pmix --kill-on-bad-exit=1 bash -c "$agent" agent bash -c "$task" task true </dev/null &
launched=$!
watch_the_clock &
clock=$!
await_step "$launched"
code=$?
kill "$clock" 2>/dev/null && wait "$clock"
exit "$code"
