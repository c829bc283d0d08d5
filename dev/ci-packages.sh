#!/usr/bin/env bash
# Install the parts of an operating system that tests/cluster runs: sshd, pdsh, SLURM. No daemon is started.
# Where this is not possible (no root, no apt, no network) it says so and succeeds: those tests then skip.
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin

packages=(openssh-server openssh-client pdsh munge slurmctld slurmd slurm-client slurm-wlm-torque iproute2 iputils-ping)
programs=(sshd ssh pdsh munged slurmctld slurmd sbatch qsub ip ping)

missing=()
for program in "${programs[@]}"; do
    command -v "$program" > /dev/null || missing+=("$program")
done
[ ${#missing[@]} -eq 0 ] && exit 0

give_up() {
    echo "tests/cluster will skip: ${missing[*]} not here, and $1" >&2
    exit 0
}
[ "$(id -u)" -eq 0 ] || give_up "only root can install them"
command -v apt-get > /dev/null || give_up "there is no apt-get"

# Debian starts a daemon as soon as its package is installed, unless this file says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod +x $policy
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
apt() {
    timeout 600 apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 "$@" >> "$log" 2>&1
}
apt update || echo "apt-get update failed; continuing with the existing lists" >&2
if ! apt install --yes --no-install-recommends "${packages[@]}"; then
    tail -n 5 "$log" >&2
    give_up "apt-get install failed"
fi
rm -f "$log"
