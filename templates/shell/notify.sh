#!/usr/bin/env bash
# notify.sh [--job ID] [--name NAME] [--site SITE] [--on EVENTS] [--command TEXT]... [--webhook file:PATH|env:NAME]... STATE EXIT_CODE
#
# Reports what became of a job (--notify): job.bash runs it at the job's end, node.pyz with --retries. A report that
# cannot be delivered is a line of the job's log and changes nothing else. A webhook's address is a secret: it is read
# here, and reaches curl or Python by a pipe, so that no list of processes and no log shows it.
set -uo pipefail

_hj_job=$HPCJOBS_JOB_ID _hj_name='' _hj_site='' _hj_on=end,fail,requeue _hj_commands=() _hj_webhooks=()
while [ $# -gt 2 ]; do
    case $1 in
        --job) _hj_job=$2 ;; # a task of an array, of which HPCJOBS_JOB_ID is Slurm's own number
        --name) _hj_name=$2 ;;
        --site) _hj_site=$2 ;;
        --on) _hj_on=$2 ;;
        --command) _hj_commands+=("$2") ;;
        --webhook) _hj_webhooks+=("$2") ;;
        *)
            echo "hpcjobs: notify: $1 is unknown" >&2
            exit 2
            ;;
    esac
    shift 2
done
_hj_state=$1 _hj_code=${2/null/}
case $_hj_state in
    COMPLETED) _hj_event=end ;;
    REQUEUED) _hj_event=requeue ;;
    *) _hj_event=fail ;;
esac
[[ ,$_hj_on, == *",$_hj_event,"* ]] || exit 0

_hj_text="job $_hj_job ($_hj_name) on $_hj_site: $_hj_state${_hj_code:+, exit code $_hj_code}"
_hj_quoted() { # TEXT: as a string of JSON
    local _hj_text=${1//\\/\\\\}
    _hj_text=${_hj_text//\"/\\\"}
    printf '"%s"' "${_hj_text//[[:cntrl:]]/?}"
}
_hj_json=$(printf '{"event":%s,"state":%s,"exit_code":%s,"job_id":%s,"name":%s,"site":%s,"run_dir":%s,"host":%s,"time":%(%s)T,"text":%s}' \
    "$(_hj_quoted "$_hj_event")" "$(_hj_quoted "$_hj_state")" "${_hj_code:-null}" "$(_hj_quoted "$_hj_job")" "$(_hj_quoted "$_hj_name")" \
    "$(_hj_quoted "$_hj_site")" "$(_hj_quoted "$HPCJOBS_RUN_DIR")" "$(_hj_quoted "$(hostname)")" -1 "$(_hj_quoted "$_hj_text")")

_hj_in_python='
import sys
sys.path = [*filter(None, sys.path)] # without the current folder, which may be of anybody
import urllib.request
address, text = sys.stdin.read().split("\n", 1)
try:
    request = urllib.request.Request(address, text.encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()
except Exception as error:
    sys.exit(str(error))
'
_hj_post() { # ADDRESS
    if command -v curl >/dev/null; then
        curl --silent --show-error --fail --max-time 10 --header 'Content-Type: application/json' --output /dev/null \
            --config <(printf 'url = "%s"\n' "$1") --data-binary @- <<<"$_hj_json"
    else
        python3 -c "$_hj_in_python" <<<"$1"$'\n'"$_hj_json"
    fi
}

for _hj_webhook in ${_hj_webhooks[@]+"${_hj_webhooks[@]}"}; do
    _hj_address=''
    case $_hj_webhook in
        file:*) read -r _hj_address <"${_hj_webhook#file:}" ;;
        env:*) _hj_variable=${_hj_webhook#env:} && _hj_address=${!_hj_variable:-} ;;
    esac 2>/dev/null
    if [ -z "$_hj_address" ]; then
        echo "hpcjobs: notify: no address in $_hj_webhook on $(hostname)" >&2
    elif ! _hj_reason=$(_hj_post "$_hj_address" 2>&1); then
        echo "hpcjobs: notify: webhook of $_hj_webhook: ${_hj_reason//"$_hj_address"/ADDRESS}" >&2
    fi
done
for _hj_command in ${_hj_commands[@]+"${_hj_commands[@]}"}; do
    HPCJOBS_JOB_ID=$_hj_job HPCJOBS_EVENT=$_hj_event HPCJOBS_STATE=$_hj_state HPCJOBS_EXIT_CODE=$_hj_code HPCJOBS_TEXT=$_hj_text \
        timeout 60 bash -c "$_hj_command" <<<"$_hj_json" || echo "hpcjobs: notify: exit code $? of: $_hj_command" >&2
done
exit 0
