#!/bin/bash
# One elastic agent of torch per node: bash agent.sh [--address-suffix=TEXT] [--numa-binding=MODE] AGENT... --no-python
# COMMAND...; COMMAND is what the agent starts for each rank.
# shellcheck disable=SC2317,SC2329  # functions called by traps
# shellcheck source-path=SCRIPTDIR source=common.bash
. "${BASH_SOURCE[0]%/*}/common.bash" || exit

_hj_address=127.0.0.1
[ "$HPCJOBS_SCHEDULER" = local ] || _hj_address=$(hostname)
case $1 in
    --address-suffix=*)
        _hj_address+=${1#*=}
        shift
        ;;
esac
_hj_numa=''
case $1 in
    --numa-binding=*)
        _hj_numa=$1
        shift
        ;;
esac
_hj_words=() _hj_python=()
while [ "$1" != --no-python ]; do
    [ "$1" != -c ] || _hj_python=("${_hj_words[@]}")
    _hj_words+=("$1")
    shift
done
if [ -n "$_hj_numa" ]; then # an option of torch 2.9 and later, which starts numactl
    if "${_hj_python[@]}" -c 'import sys; sys.path = [*filter(None, sys.path)]
import importlib.util, os.path, shutil
places: list = list(getattr(importlib.util.find_spec("torch"), "submodule_search_locations", ())) + ["/nowhere"]
raise SystemExit(not (shutil.which("numactl") and os.path.exists(places[0] + "/numa/binding.py")))'; then
        _hj_words+=("$_hj_numa")
    else
        echo "hpcjobs: no $_hj_numa: it needs numactl and torch 2.9 or later" >&2
    fi
fi
_hj_words+=(--rdzv-conf="is_host=$((${SLURM_NODEID:-0} == 0))" --local-addr="$_hj_address")
_hj_words+=("${@//\$/\$\$}") # the agent takes these for templates, in which two dollars are one

[ -n "${HPCJOBS_CONTROL_DIR:-}" ] || exec "${_hj_words[@]}"

# With --retries the ranks save and leave first, and not the agent; Slurm may signal this shell alone (proctrack/cgroup).
_hj_ranks=$HPCJOBS_CONTROL_DIR/ranks-$(hostname)
rm -rf -- "$_hj_ranks" && mkdir -- "$_hj_ranks"
_hj_program='' _hj_signal=''
trap 'cat "$_hj_ranks"/* 2>/dev/null | xargs -r kill -USR2 2>/dev/null' USR1
trap '_hj_signal=TERM; kill -TERM "$_hj_program" 2>/dev/null' TERM
(trap "" USR1 && exec "${_hj_words[@]}") &
_hj_await_program $!
_hj_write_control "ends/${SLURM_NODEID:-0}" "$_hj_code"
exit "$_hj_code"
