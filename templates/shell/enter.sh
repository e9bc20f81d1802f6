#!/bin/bash
# Runs a command in a container: bash enter.sh OPTIONS -- COMMAND [ARGUMENTS]...
# What the image needs is checked on each node, so that what is missing is named where it is missing.
#   --exit-code=N          exit code where the container cannot be started
#   --name=NAME            of the image, for messages
#   --program=FILE         apptainer or singularity, and --prefix=NAME of its variables (APPTAINER)
#   --image=FILE           and --fingerprint=HASH of it when the job was submitted; --staged: HPCJOBS_IMAGE is a copy
#   --driver=VERSION       oldest NVIDIA driver that the image works with
#   --bind=FROM:TO:MODE    a folder that the image sees; --scratch=FOLDER where it exists
#   --env=NAME             variable of the job
#   --package-path=FOLDER  for PYTHONPATH in the image, and --keep-python-path to append the job's own
#   --no-home              the image sees no home
#   --option=WORD          further word of `exec`
_hj_code=1 _hj_name='' _hj_program='' _hj_prefix='' _hj_image='' _hj_fingerprint='' _hj_driver='' _hj_scratch=''
_hj_package_path='' _hj_python_path='' _hj_home=yes _hj_staged=''
_hj_binds=() _hj_env=() _hj_words=(--quiet exec --no-eval)
while [ "$1" != -- ]; do
    case $1 in
        --exit-code=*) _hj_code=${1#*=} ;;
        --name=*) _hj_name=${1#*=} ;;
        --program=*) _hj_program=${1#*=} ;;
        --prefix=*) _hj_prefix=${1#*=} ;;
        --image=*) _hj_image=${1#*=} ;;
        --fingerprint=*) _hj_fingerprint=${1#*=} ;;
        --staged) _hj_staged=yes ;;
        --driver=*) _hj_driver=${1#*=} ;;
        --bind=*) _hj_binds+=("${1#*=}") ;;
        --scratch=*) _hj_scratch=${1#*=} ;;
        --env=*) _hj_env+=("${1#*=}") ;;
        --package-path=*) _hj_package_path=${1#*=} ;;
        --keep-python-path) _hj_python_path=:${PYTHONPATH:-} ;;
        --no-home) _hj_home='' ;;
        --option=*) _hj_words+=("${1#*=}") ;;
        *)
            echo "hpcjobs: enter.sh: no option $1" >&2
            exit "$_hj_code"
            ;;
    esac
    shift
done
shift

_hj_refuse() {
    echo "hpcjobs: $(hostname): container $_hj_name: $*" >&2
    exit "$_hj_code"
}
command -v "$_hj_program" >/dev/null ||
    _hj_refuse "no program $_hj_program on this node: name its module, or containers.program, in the site file"
# The copy counts if its folder is ours: another user could replace it after a look at the copy itself.
[ -z "$_hj_staged" ] || [ ! -O "${HPCJOBS_IMAGE:-}" ] ||
    [ -z "$(find "${HPCJOBS_IMAGE%/*}" -maxdepth 0 -type d -uid "$UID")" ] || _hj_image=$HPCJOBS_IMAGE
[ -r "$_hj_image" ] || _hj_refuse "there is no $_hj_image, or not for $(id -un)"
[ -z "$_hj_fingerprint" ] ||
    [ "$({ stat -Lc %s -- "$_hj_image" && head -c 65536 -- "$_hj_image"; } | sha256sum | cut -c 1-16)" = "$_hj_fingerprint" ] ||
    _hj_refuse "$_hj_image has changed since this job was submitted: submit it again"
if [ -n "$_hj_driver" ]; then
    _hj_installed=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    [ -n "$_hj_installed" ] || _hj_refuse 'its CUDA needs an NVIDIA driver, and nvidia-smi finds none'
    printf '%s\n' "$_hj_driver" "$_hj_installed" | sort -VC ||
        _hj_refuse "its CUDA needs driver $_hj_driver or later, and there is $_hj_installed"
fi

# Scratch of the job, and the folder in which Slurm's PMIx waits for its ranks.
for _hj_folder in "$_hj_scratch" "${TMPDIR:-}" "${PMIX_SERVER_TMPDIR:-}" "${PMIX_SYSTEM_TMPDIR:-}"; do
    [[ ! -d $_hj_folder || $_hj_folder == /tmp* ]] || _hj_binds+=("$_hj_folder:$_hj_folder:rw")
done
for _hj_bind in "${_hj_binds[@]}"; do
    [ -r "${_hj_bind%%:*}" ] || _hj_refuse "there is no ${_hj_bind%%:*} to bind, or not for $(id -un)"
    _hj_words+=(--bind "$_hj_bind")
done

# The image's own environment would win over that of the job; nothing in a value is evaluated (--no-eval).
for _hj_variable in RANK LOCAL_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE \
    CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES \
    "${!MASTER_@}" "${!HPCJOBS_@}" "${!OMP_@}" "${!SLURM_@}" "${!PMI_@}" "${!PMIX_@}" "${!OMPI_@}" "${!PRTE_@}" \
    "${!HOROVOD_@}" "${!NCCL_@}" "${!RCCL_@}" "${!GLOO_@}" "${!UCX_@}" "${!TORCHELASTIC_@}" "${!GROUP_@}" "${!ROLE_@}" \
    TORCH_CPP_LOG_LEVEL TORCH_DISABLE_SHARE_RDZV_TCP_STORE TMPDIR "${_hj_env[@]}"; do
    [ -z "${!_hj_variable+x}" ] || export "${_hj_prefix}ENV_$_hj_variable=${!_hj_variable}"
done
export "${_hj_prefix}ENV_PYTHONPATH=$_hj_package_path$_hj_python_path"
if [ -z "$_hj_home" ]; then
    export "${_hj_prefix}ENV_PYTHONNOUSERSITE=1"
    _hj_words+=(--no-home)
fi
unset PYTHONHOME
PATH=${BASH_SOURCE[0]%/*}/fuse:$PATH
exec "$_hj_program" "${_hj_words[@]}" --pwd "$PWD" "$_hj_image" "$@"
