#!/usr/bin/env bash
# Run "$@" twice, with MACHINE_RANK 0 and 1, in two network namespaces that see each other through one cable
# (10.77.0.1 and 10.77.0.2). Where namespaces are not allowed: exit code 77 before anything has run.
set -euo pipefail
if [ "${1-}" != --inside ]; then
    unshare --user --map-root-user --net true 2>/dev/null && command -v ip nsenter >/dev/null || exit 77
    exec unshare --user --map-root-user --net --fork --kill-child bash "$0" --inside "$@"
fi
shift
# The second namespace lasts as long as the process that holds it.
unshare --net sleep 600 &
holder=$!
trap 'kill $holder' EXIT
for _ in $(seq 100); do
    [ "$(readlink /proc/$holder/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.05
done
second() { nsenter --target $holder --net "$@"; }
ip link add cable0 type veth peer name cable1 || exit 77
ip link set cable1 netns $holder
ip addr add 10.77.0.1/24 dev cable0
second ip addr add 10.77.0.2/24 dev cable1
ip link set lo up
second ip link set lo up
ip link set cable0 up
second ip link set cable1 up
MACHINE_RANK=1 GLOO_SOCKET_IFNAME=cable1 nsenter --target $holder --net "$@" >/dev/null &
other=$!
code=0
MACHINE_RANK=0 GLOO_SOCKET_IFNAME=cable0 "$@" || code=$?
wait $other || code=$?
exit $code
