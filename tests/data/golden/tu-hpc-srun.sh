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

# shellcheck disable=SC1090,SC1091,SC2154  # files of the node and of the run folder, which set _hj_... variables
_hj_shell=/RUN/shell # docs/job_script.md says what is in it
export HPCJOBS_SCHEDULER=slurm HPCJOBS_JOB_ID=$SLURM_JOB_ID
export HPCJOBS_RUN_DIR=/RUN
unset HPCJOBS_CONTROL_DIR # of another job, which submitted this one
. "$_hj_shell/job.bash" || exit # state.json, signals, `die`, `free_port`

# --- what srun reads from the environment: after --export=NONE it would start tasks without this script's
export SLURM_EXPORT_ENV=ALL

# --- software of the site
# What was loaded at login is here in part only; while it counts as loaded, module load does nothing.
unset LOADEDMODULES _LMFILES_ "${!_ModuleTable@}" "${!__MODULES_LM@}"
for _hj_init in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    if ! command -v module >/dev/null && [ -r "$_hj_init" ]; then . "$_hj_init"; fi
done
command -v module >/dev/null || die 'no module command on this node: set module_init in the site file'
module load openmpi || die 'module load openmpi failed'
command -v conda >/dev/null || die 'no conda on this node: set environment.conda_init'
eval "$(conda shell.bash hook)"
conda activate hvd-cpu || die 'conda environment hvd-cpu cannot be activated'

# --- environment of every task
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(free_port) # on this node, where rank 0 will run
export MASTER_ADDR MASTER_PORT HPCJOBS_NNODES=$SLURM_JOB_NUM_NODES HPCJOBS_NTASKS_PER_NODE=2
export HPCJOBS_NTASKS=$((HPCJOBS_NNODES * HPCJOBS_NTASKS_PER_NODE))
export HPCJOBS_LAUNCHED_BY='srun --mpi=pmix' OMP_NUM_THREADS=1
export HPCJOBS_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export PYTHONUTF8=1
export GREETING='it'"'"'s'
unset TORCHELASTIC_RUN_ID
cd -- /HERE || die 'the working folder is not there on this node'

# --- what the launcher needs
export OMPI_MCA_btl_tcp_if_include=eth0
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}

# --- launch
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * 2))" --ntasks-per-node=2 --cpus-per-task=1 --mpi=pmix --kill-on-bad-exit=1 --label bash "$_hj_shell/rank.sh" -- python -u train.py --epochs 3 'two words' </dev/null &
_hj_await_step $!
exit "$_hj_code"
