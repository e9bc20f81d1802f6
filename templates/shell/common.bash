# shellcheck shell=bash
# What job.sh, rank.sh and agent.sh share. Variables and functions are _hj_..., apart from `die` and `free_port`.

die() { # MESSAGE: end the job with it
    echo "hpcjobs: $(hostname): $*" >&2
    exit 1
}

free_port() { # [FROM]: the first port from there on that is free on this node; jobs start apart from each other
    local id=${HPCJOBS_JOB_ID//[!0-9]/} port
    [ "$HPCJOBS_SCHEDULER" != local ] || id=$$ # ids of two queues on this host may be equal, processes' are not
    port=${1:-$((15000 + (10#$id * 7 + UID) % 16000))}
    while grep -qi ":$(printf '%04X' "$port") " /proc/net/tcp /proc/net/tcp6 2>/dev/null; do
        port=$((port + 1))
    done
    echo "$port"
}

_hj_wait() { # PID: until it has ended; sets _hj_code
    wait "$1"
    _hj_code=$?
    while [ "$_hj_code" -gt 128 ] && kill -0 "$1" 2>/dev/null; do # a trapped signal has ended `wait` early
        wait "$1"
        _hj_code=$?
    done
}

_hj_await_program() { # PID: until the program of this task has ended; sets _hj_code
    local again
    _hj_program=$1
    [ -z "$_hj_signal" ] || kill -s "$_hj_signal" "$1" 2>/dev/null # it came before the program
    _hj_wait "$1"
    [ "$_hj_code" -gt 128 ] || return 0
    trap '' TERM INT HUP USR1 USR2 # for the program, which has ended; the next line must not hear them
    # Of a child that ends as a signal comes bash may forget the code, and would wait for it for ever.
    if ! jobs -rp | grep -qx "$1"; then
        wait "$1" 2>/dev/null
        again=$?
        [ "$again" -eq 127 ] || _hj_code=$again # 127: bash has reported its end before
    fi
}

_hj_write_control() { # NAME TEXT: also on a disk that is full, or a file system that is away, for a moment
    for _ in {1..60}; do
        { echo "$2" >"$HPCJOBS_CONTROL_DIR/$1"; } 2>/dev/null && return
        sleep 1
    done
    echo "hpcjobs: $(hostname): $HPCJOBS_CONTROL_DIR/$1 cannot be written for a minute: the end of this rank is not recorded" >&2
}
