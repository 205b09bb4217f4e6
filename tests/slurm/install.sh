#!/usr/bin/env bash
# Installs what the tests here start: Slurm, munge and OpenMPI, from Debian or Ubuntu.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for pair in slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge mpirun:openmpi-bin mpicc:libopenmpi-dev; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Installed daemons are not to be started: the tests bring their own configuration.
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
trap 'rm -f /usr/sbin/policy-rc.d' EXIT
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
