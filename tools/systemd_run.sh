#!/usr/bin/env bash
# Runs examples/systemd/tandem.service under systemd: boots a bare Debian 12 in namespaces of this machine, installs this
# tree in it, and starts, breaks and stops the service. Prints one JSON line. As root.
#
# usage: systemd_run.sh [--root FOLDER] [--port N]
#
#   --root FOLDER  of the Debian system; made by debootstrap if it is missing (1.5 GB, 5 minutes), kept for the next run
#                  (default: ~/.cache/tandem-systemd)
#   --port N       of the gateway, which is on this machine's loopback address (default: 18765)
#
# Needs debootstrap, unshare, nsenter and a name=systemd hierarchy of cgroups (version 1 or hybrid).
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' tools/systemd_run.sh; }
die() { printf 'systemd_run: %s\n' "$1" >&2; exit 1; }

root=$HOME/.cache/tandem-systemd
port=18765
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --root) root=$(realpath -m "${2:?--root needs a folder}") && shift ;;
    --port) port=${2:?--port needs a number} && shift ;;
    *) die "unknown argument '$1': see --help" ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || die 'root is needed: it mounts, and boots systemd'
for tool in debootstrap unshare nsenter curl; do command -v $tool > /dev/null || die "$tool is not installed"; done
[ -d /sys/fs/cgroup/systemd ] || die 'this machine has no name=systemd hierarchy of cgroups'

init=
stop() {
    [ -z "$init" ] || kill -9 "$init" 2> /dev/null || true
}
trap stop EXIT

install() {
    [ -e "$root/usr/bin/redis-server" ] || debootstrap --variant=minbase \
        --include=systemd,systemd-sysv,dbus,python3,python3-venv,redis-server bookworm "$root"
    rm -f "$root/etc/systemd/system/multi-user.target.wants/redis-server.service"
    # pip runs here, with this machine's settings; Debian's Python only unpacks. redis needs async-timeout before 3.11.3.
    rm -rf "$root/wheels" && mkdir "$root/wheels"
    "${TANDEM_VENV:-.venv}/bin/python" -m pip wheel -q -c docker/constraints.txt -w "$root/wheels" '.[engine]' async-timeout
    chroot "$root" python3 -m venv --clear /opt/tandem
    chroot "$root" /opt/tandem/bin/pip install -q --no-index --find-links /wheels --disable-pip-version-check \
        'tandem-llm[engine]'
    sed "s/--port 8000/--port $port/" examples/systemd/tandem.service > "$root/etc/systemd/system/tandem.service"
    rm -rf "$root"/var/lib/private/tandem "$root"/var/cache/private/tandem
}

boot() {
    # shellcheck disable=SC2016  # expanded by the inner shell
    unshare --mount --pid --fork --uts --ipc bash -euc '
        mount --make-rprivate /
        mount --bind "$0" "$0"
        mount -t proc proc "$0/proc"
        mount -t sysfs sysfs "$0/sys"
        mount --rbind /dev "$0/dev"
        mount -t tmpfs tmpfs "$0/sys/fs/cgroup"
        mkdir "$0/sys/fs/cgroup/systemd"
        mount -t cgroup -o none,name=systemd cgroup "$0/sys/fs/cgroup/systemd"
        mount -t tmpfs -o mode=755 tmpfs "$0/run"
        exec env -i container=oci PATH=/usr/bin:/usr/sbin:/bin:/sbin chroot "$0" /sbin/init --unit=multi-user.target
    ' "$root" > "$root/boot.log" 2>&1 &
    for _ in $(seq 100); do
        init=$(pgrep -P $! || true)
        if [ -n "$init" ] && inside systemctl is-active multi-user.target > /dev/null 2>&1; then return; fi
        sleep 0.2
    done
    die "systemd does not start: $root/boot.log"
}

inside() { nsenter -t "$init" -p -m -u -i chroot "$root" "$@"; }

value() { inside systemctl show tandem -p "$1" --value; }

answer() {
    curl -sf -m 60 "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
        -d '{"model": "tandem-mini", "prompt": "Once upon", "max_tokens": 8}' | grep -q '"finish_reason":"length"' ||
        die 'the service gives no answer'
}

seconds() { awk -v from="$1" 'BEGIN { getline now < "/proc/uptime"; split(now, up, " "); printf "%.1f", up[1] - from }'; }
now() { cut -d' ' -f1 /proc/uptime; }

install
boot
from=$(now)
inside systemctl start tandem || { inside journalctl -u tandem -o cat --no-pager | tail -20 >&2; die 'the service does not start'; }
started=$(seconds "$from")
answer

from=$(now)
inside systemctl kill -s KILL --kill-who=main tandem
for _ in $(seq 600); do
    if [ "$(value NRestarts)" = 1 ] && [ "$(value ActiveState)" = active ]; then break; fi
    sleep 0.2
done
[ "$(value NRestarts) $(value ActiveState)" = '1 active' ] || die 'the service does not come back after kill -9'
restarted=$(seconds "$from")
answer

from=$(now)
inside systemctl stop tandem
stopped=$(seconds "$from")
result=$(value Result)
[ "$result" = success ] || die "the service ended with $result"
printf '{"started_s": %s, "restarted_after_kill_s": %s, "stopped_s": %s, "result": "%s", "systemd": "%s"}\n' \
    "$started" "$restarted" "$stopped" "$result" "$(inside systemctl --version | head -1)"
