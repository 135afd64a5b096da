#!/bin/sh
# Open MPI's plm_ssh_agent inside a lab of python/oallama/netlab: runs a command line in another host, as ssh would.
# The lab is the one that the caller runs in (OALLAMA_NETLAB, set by NetLab.command); hosts go by their names.
if [ -z "$OALLAMA_NETLAB" ] || [ ! -e "/run/netns/$OALLAMA_NETLAB$1" ]; then
    echo "netlab: expected to run inside a lab that has a host '$1'" >&2
    exit 255
fi
host=$1
shift
# The host's CPUs, where the lab gave each its own ("h0=0;h1=1").
cpus=$(printf ';%s;' "$OALLAMA_NETLAB_CPUS" | sed -n "s/.*;$host=\([^;]*\);.*/\1/p")
# shellcheck disable=SC2016 # for the inner shell
exec ip netns exec "$OALLAMA_NETLAB$host" ${cpus:+taskset -c "$cpus"} unshare --uts \
    sh -c 'echo "$0" >/proc/sys/kernel/hostname && exec sh -c "$1"' "$host" "$*"
