#!/usr/bin/env bash
# Debian packages for the tests of hosts, SLURM and deploy/. Starts no service. Tests whose tools are missing are skipped.
set -euo pipefail

tools=(ip nsenter munged slurmctld slurmd sbatch shellcheck systemd-analyze)
packages=(iproute2 util-linux munge slurmctld slurmd slurm-client shellcheck systemd)
PATH=$PATH:/usr/sbin:/sbin
if command -v "${tools[@]}" >/dev/null 2>&1 && [ "$(command -v "${tools[@]}" | wc -l)" = "${#tools[@]}" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "needs root and apt-get, for: ${packages[*]}" >&2
    exit 1
fi
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then # while they are installed, services are not to be started
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" </dev/null >&2
