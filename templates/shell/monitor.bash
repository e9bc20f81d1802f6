# shellcheck shell=bash
# The sampler of `submit --monitor`: one process on each node, in a step that shares the job's resources. It ends with the
# job. What it prints goes to monitor.log, so that the log of the job is the program's alone.
# shellcheck disable=SC2154  # of job.sh and job.bash
_hj_sample() { # becomes srun, or the sampler itself
    if [ "$HPCJOBS_SCHEDULER" = slurm ]; then
        unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE # the program's step has all of it; --mem=0 shares it
        # When a node fails, the samplers of the others go on.
        set -- srun --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --export=ALL --mem=0 --mpi=none "--nodelist=$SLURM_JOB_NODELIST" \
            "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"
    fi
    exec env HPCJOBS_MONITOR=1 "$@" "$HPCJOBS_RUN_DIR" "$HPCJOBS_JOB_ID" 5
}

if "${_hj_sampler[0]}" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
    _hj_sample "${_hj_sampler[@]}" </dev/null >"$HPCJOBS_RUN_DIR/monitor.log" 2>&1 &
    _hj_helpers+=($!)
else
    echo "hpcjobs: $(hostname): no sampler: --monitor needs Python 3.6 or newer on the nodes, and ${_hj_sampler[0]} is none" >&2
fi
