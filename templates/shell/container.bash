# shellcheck shell=bash disable=SC2154  # _hj_shell and _hj_enter are of job.sh
# Read by the job.sh of a job in a container: what is done once, before any task starts.

_hj_make_fuse_deaf() {
    # Slurm signals every process of a step. The one that serves the image's files to an ordinary user must ignore it: a
    # program that saves because of the signal still reads from them.
    local name program
    [ "$UID" -ne 0 ] || return 0
    mkdir -p "$_hj_shell/fuse"
    for name in squashfuse_ll squashfuse; do
        program=$(command -v "$name") || continue
        printf '#!/bin/sh\ntrap "" HUP INT TERM USR1 USR2\nexec %s "$@"\n' "$program" >"$_hj_shell/.$name-$HPCJOBS_JOB_ID"
        chmod 700 "$_hj_shell/.$name-$HPCJOBS_JOB_ID"
        mv -f -- "$_hj_shell/.$name-$HPCJOBS_JOB_ID" "$_hj_shell/fuse/$name"
    done
}

_hj_try_container() { # COMMAND: run it in the image once: a start that fails fails once, and early
    local code
    "${_hj_enter[@]}" "$@" </dev/null && return
    code=$?
    [ "$code" -eq "$_hj_enter_code" ] ||
        echo "hpcjobs: $(hostname): container $_hj_enter_name cannot be started; why stands above" >&2
    exit "$_hj_enter_code"
}
