# shellcheck shell=sh
# For /etc/profile.d/hpcjobs.sh: set the path of the installation. Its folder `command` holds the command alone.
case ":$PATH:" in
*:/apps/hpcjobs/current/command:*) ;;
*)
    PATH="$PATH:/apps/hpcjobs/current/command"
    HPCJOBS_SITE_PATH="/apps/hpcjobs/site_configs${HPCJOBS_SITE_PATH:+:$HPCJOBS_SITE_PATH}"
    export PATH HPCJOBS_SITE_PATH
    ;;
esac
