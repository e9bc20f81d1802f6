# shellcheck shell=bash
# The reader of figures of merit: one process on the first node, beside the program. It follows the file behind this script's
# standard output, and ends once _hj_finish tells it to. What it prints goes to figures.log.
# shellcheck disable=SC2154  # of job.sh and job.bash
_hj_read_figures() { # from here on: what earlier attempts wrote into the log does not count
    local begin
    local self=$BASHPID
    begin=$(stat -Lc %s -- "/proc/$self/fd/1")
    if "${_hj_figures[0]}" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
        rm -f -- "$HPCJOBS_RUN_DIR/.exit_code" # of an earlier attempt
        trap '' HUP                              # a program may end before its reader has begun
        "${_hj_figures[@]}" "${begin:-0}" "$HPCJOBS_RUN_DIR" </dev/null 2>"$HPCJOBS_RUN_DIR/figures.log" &
        _hj_reader=$!
        trap - HUP
    else
        echo "hpcjobs: $(hostname): no figures: --metric needs Python 3.6 or newer on the nodes, and ${_hj_figures[0]} is none" >&2
    fi
}
