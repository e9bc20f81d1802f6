#!/bin/bash
# Copies an image to HPCJOBS_IMAGE, on the node's own disk, once: bash stage.sh IMAGE
# The copy is kept for later jobs. What would be read over the network is read from that disk.
umask 077
mkdir -p "${HPCJOBS_IMAGE%/*}"
# Somebody else's folder of this name, or link to a folder of ours: nothing in it is to be trusted.
[ -n "$(find "${HPCJOBS_IMAGE%/*}" -maxdepth 0 -type d -uid "$UID")" ] || exit
exec 9>"$HPCJOBS_IMAGE.lock"
flock 9
# Other copies that no job has used for a week make room; the time of each copy is that of its last use.
find "${HPCJOBS_IMAGE%/*}" -maxdepth 1 -name '*.sif*' ! -path "$HPCJOBS_IMAGE*" -mtime +6 -delete
[ "$(stat -c %s "$HPCJOBS_IMAGE" 2>/dev/null)" = "$(stat -Lc %s "$1")" ] && touch -- "$HPCJOBS_IMAGE" && exit
cp -- "$1" "$HPCJOBS_IMAGE.part" && mv -f -- "$HPCJOBS_IMAGE.part" "$HPCJOBS_IMAGE" && exit
rm -f -- "$HPCJOBS_IMAGE.part"
echo "hpcjobs: $(hostname): no copy of $1 in ${HPCJOBS_IMAGE%/*}: it is read where it is" >&2
