#!/usr/bin/env bash
# Runs examples/compose/compose.yaml with docker: starts it, asks for an answer, kills both containers' processes one after
# the other, asks again, and stops it. Prints one JSON line.
#
# usage: compose_run.sh [--port N]
#
#   --port N   of the gateway, on this machine's loopback address (default: 18766)
#
# Needs a docker daemon of this machine (DOCKER_HOST), the compose plugin, root to kill, and the images that the file names:
# `make images`, or pulled.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' tools/compose_run.sh; }
die() { printf 'compose_run: %s\n' "$1" >&2; exit 1; }

port=18766
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --port) port=${2:?--port needs a number} && shift ;;
    *) die "unknown argument '$1': see --help" ;;
    esac
    shift
done
docker compose version > /dev/null 2>&1 || die 'docker has no compose plugin'
docker info > /dev/null 2>&1 || die 'no docker daemon answers: see DOCKER_HOST'

folder=$(mktemp -d)
sed "s/127.0.0.1:8000:8000/127.0.0.1:$port:8000/" examples/compose/compose.yaml > "$folder/compose.yaml"
compose() { docker compose --project-name "tandem-run-$port" -f "$folder/compose.yaml" "$@"; }
for image in $(compose config --images); do
    docker image inspect "$image" > /dev/null 2>&1 || die "image $image is not here: make images, or docker pull $image"
done
stop() {
    compose down --timeout 1 > /dev/null 2>&1 || true
    rm -r "$folder"
}
trap stop EXIT

status() { docker inspect --format "$2" "$(compose ps --all --quiet "$1")"; }

answer() {
    curl -sf -m 60 "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
        -d '{"model": "tandem-mini", "prompt": "Once upon", "max_tokens": 8}' | grep -q '"finish_reason":"length"' ||
        die "$1: no answer"
}

# Docker restarts a container whose process ends, but not one that `docker kill` has ended.
kill_process() {
    kill -9 "$(status "$1" '{{.State.Pid}}')"
    for _ in $(seq 1500); do
        if [ "$(status "$1" '{{.RestartCount}} {{.State.Health.Status}}')" = '1 healthy' ]; then return; fi
        sleep 0.2
    done
    compose logs --tail 20 "$1" >&2
    die "$1 is not healthy 5 minutes after kill -9"
}

now() { cut -d' ' -f1 /proc/uptime; }
seconds() { awk -v from="$1" 'BEGIN { getline now < "/proc/uptime"; split(now, up, " "); printf "%.1f", up[1] - from }'; }

from=$(now)
compose up --wait > "$folder/up.log" 2>&1 || { cat "$folder/up.log" >&2; compose logs --tail 20 >&2; die 'the file does not start'; }
started=$(seconds "$from")
answer 'after the start'

declare -A restarted
for service in tandem redis; do
    from=$(now)
    kill_process "$service"
    restarted[$service]=$(seconds "$from")
    answer "after kill -9 of $service"
done

from=$(now)
compose stop > /dev/null 2>&1
stopped=$(seconds "$from")
code=$(status tandem '{{.State.ExitCode}}')
[ "$code" = 0 ] || die "tandem ended with $code"
printf '{"started_s": %s, "tandem_back_s": %s, "redis_back_s": %s, "stopped_s": %s, "docker": "%s", "compose": "%s"}\n' \
    "$started" "${restarted[tandem]}" "${restarted[redis]}" "$stopped" \
    "$(docker version --format '{{.Server.Version}}')" "$(docker compose version --short)"
