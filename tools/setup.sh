#!/usr/bin/env bash
# Sets up what `make up` needs (runtime) or `make test` as well (dev, the default), and only what is missing:
# Debian packages (as root), a virtual environment, torch, Tandem and its dependencies.
#
# usage: setup.sh [runtime|dev]
#
#   TANDEM_TORCH=cpu    the CPU build of torch; default: the one that an earlier set-up chose, else this one
#   TANDEM_TORCH=cuda   the CUDA build, for a machine with an NVIDIA GPU
#   TANDEM_VENV=DIR     where the virtual environment goes (default .venv)
#   TANDEM_LOCK=no      runtime: the newest versions that fit, not those that tests passed with (yes); default: the
#                       choice of an earlier set-up, else yes
#   PYTHON=python3.11   the interpreter that makes it (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-dev}
venv=${TANDEM_VENV:-.venv}
python=${PYTHON:-python3}
torch_version=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu
lock=docker/locks/engine-cpu.txt
uv_lock=docker/locks/uv.txt
constraints=docker/constraints.txt

step() { printf '\n[%s/4] %s\n' "$1" "$2"; }
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

stamp=$venv/.tandem-setup
stamped=$(cat "$stamp" 2>/dev/null || true)
# Without the choices of the first set-up, `make up` would replace the CUDA build of torch, or fail at an index again.
read -r _ chosen _ chosen_lock <<<"$stamped"
flavour=${TANDEM_TORCH:-${chosen:-cpu}}
locked=${TANDEM_LOCK:-${chosen_lock:-yes}}

case $kind in runtime) extras=engine ;; dev) extras=dev ;; *) fail "runtime or dev, not '$kind'" ;; esac
case $locked in yes | no) ;; *) fail "TANDEM_LOCK must be yes or no, got '$locked'" ;; esac
case $flavour in cpu | cuda) ;; *) fail "TANDEM_TORCH must be cpu or cuda, got '$flavour'" ;; esac

# A stamp of everything the result depends on makes the second run a no-op. What tests need has all that runs.
want="$(sha256sum pyproject.toml tools/setup.sh "$lock" "$constraints" | sha256sum | cut -d' ' -f1) $flavour"
if command -v redis-server >/dev/null; then
    case $stamped in "$want dev "* | "$want $kind $locked") exit 0 ;; esac
fi

step 1 "Debian packages"
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v "$python" >/dev/null || missing+=(python3)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || fail "missing ${missing[*]}: run 'sudo apt-get install ${missing[*]}' and try again"
    command -v apt-get >/dev/null || fail "missing ${missing[*]} and no apt-get: install them and try again"
    apt-get update -q
    # Tandem starts a redis-server of its own on a free port: keep Debian's service from being started.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        # Removed at the end, however the installation ends.
        trap 'rm -f "$policy"' EXIT
        install -m 755 /dev/stdin "$policy" <<<$'#!/bin/sh\nexit 101'
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
    if [ -n "$(trap -p EXIT)" ]; then rm -f "$policy"; trap - EXIT; fi
else
    echo "nothing to install"
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11: set PYTHON=/path/to/python3.11"

step 2 "Virtual environment in $venv"
interpreter=$venv/bin/python
[ -x "$interpreter" ] || interpreter=$python
# What serves has the versions that tests passed with, as images do: by hash where their lock is for this machine. An
# environment for tests gets what the index has, so that the next lock can be made of it (docker/pin.py).
by_hash=
more=()
if [ "$kind $locked" = "runtime yes" ]; then
    more=(--constraint "$constraints")
    machine=$("$interpreter" -c 'import platform, sys; print(platform.machine(), *sys.version_info[:2])')
    [ "$flavour $machine" = "cpu x86_64 3 11" ] && by_hash=yes
fi
# Without pip, which uv adds in a tenth of a second: ensurepip takes three.
[ -x "$venv/bin/python" ] || "$python" -m venv ${by_hash:+--without-pip} "$venv"
# pip compiles all modules, one after the other, which is half of its work.
install=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile)
hashed=("${install[@]}" --require-hashes --no-deps --requirement "$venv/.tandem-lock")

has_pip() { "$venv/bin/python" -c 'import pip' 2>/dev/null; }
require_pip() { has_pip || "$python" -m venv "$venv"; }
[ -n "$by_hash" ] || require_pip

# The wheel that `python -m ensurepip` would install. It can be run as it is.
bundled_pip() {
    "$venv/bin/python" - <<'END'
import ensurepip, pathlib, sys, sysconfig
folders = sysconfig.get_config_var("WHEEL_PKG_DIR"), pathlib.Path(ensurepip.__file__).parent / "_bundled"
wheels = [pathlib.Path(each) / f"pip-{ensurepip.version()}-py3-none-any.whl" for each in folders if each]
found = next((wheel for wheel in wheels if wheel.is_file()), None)
print(found or "")
sys.exit(found is None)
END
}

# Get uv by pip, from pip's package index, and set it to the indexes of pip; fails where that is not possible. uv
# installs the lock with a third of pip's CPU time, on all cores.
uv=()
bundled=
get_uv() {
    local pip=("$venv/bin/python" -m pip) from translation settings
    if ! has_pip; then
        bundled=$(bundled_pip) || return 1
        pip=("$venv/bin/python" "$bundled/pip")
    fi
    exec {from}< <("${pip[@]}" config list | "$venv/bin/python" tools/uv_settings.py)
    translation=$!
    "${pip[@]}" --disable-pip-version-check install --no-compile -q --require-hashes --no-deps -r "$uv_lock" || return 1
    settings=$(cat <&"$from")
    exec {from}<&-
    wait "$translation" || return 1
    [ -x "$venv/bin/uv" ] || return 1
    eval "$settings"
    # As pip: of all indexes. The hashes say which file it may be.
    uv=("$venv/bin/uv" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match ${UV_FLAGS[@]+"${UV_FLAGS[@]}"} --no-deps)
}

step 3 "torch $torch_version ($flavour build)"
have=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
if [ -n "$by_hash" ]; then
    echo "with all other dependencies, from $lock"
    # As docker/install-dependencies.sh: NIXL comes twice, for CUDA 12 and 13, and torch is built with 13.
    grep -v '^nixl-cu12==' "$lock" >"$venv/.tandem-lock"
    { get_uv && { "${uv[@]}" --require-hashes -r "$venv/.tandem-lock" ||
        "${uv[@]}" --require-hashes -r "$venv/.tandem-lock" --index "$cpu_index"; }; } || { uv=() && require_pip; }
    [ ${#uv[@]} -gt 0 ] || "${hashed[@]}" || "${hashed[@]}" --extra-index-url "$cpu_index" ||
        fail "the package index lacks a file of $lock: TANDEM_LOCK=no takes what it has"
elif [ "$flavour" = cuda ]; then
    case $have in "$torch_version" | "$torch_version"+cu*) echo "already there: $have" ;; *) "${install[@]}" "torch==$torch_version" ;; esac
elif [ "$have" = "$torch_version+cpu" ]; then
    echo "already there: $have"
else
    # A configured package index may carry the CPU build itself; the public one for it is the fallback.
    "${install[@]}" "torch==$torch_version+cpu" 2>/dev/null ||
        "${install[@]}" "torch==$torch_version" --index-url "$cpu_index" --extra-index-url https://pypi.org/simple
fi

step 4 "Tandem and its dependencies"
# A fifth of all modules, which the processes of the first start would each compile: half of them in each process.
compile_modules() {
    for imported in tandem_engine.engine.process,tandem_engine.executor.self_test \
        numba,tandem_engine.kernels.cpu.build,tandem_services.cli.main,tandem_services.gateway.serve,tandem_services.worker.service; do
        env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=engine:services:lab "$venv/bin/python" -c "import $imported" &
    done
}
if [ -n "$by_hash" ]; then
    compile_modules
    [ ${#uv[@]} -gt 0 ] && "${uv[@]}" -e . ${bundled:+"$bundled"} || { require_pip && "${install[@]}" --no-deps -e .; }
elif [ ${#more[@]} -gt 0 ]; then
    "${install[@]}" "${more[@]}" -e ".[$extras]" ||
        fail "if the package index lacks a version of $constraints: TANDEM_LOCK=no takes what it has"
else
    "${install[@]}" -e ".[$extras]"
fi
# xds-protos up to 1.85 has an old copy of this package's files; the package installed last wins (grpc/grpc#42926).
[ "$kind" = runtime ] ||
    "$venv/bin/python" -c 'from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope' 2>/dev/null ||
    "${install[@]}" --force-reinstall --no-deps opentelemetry-proto
if [ "$kind" = runtime ]; then
    [ -n "$by_hash" ] || compile_modules
    wait
else
    # Not what is hardly ever imported. Templates and code for other versions of Python among the rest do not compile.
    rare='transformers/models|kubernetes/(aio/)?client|torch/testing|networkx|pygments/lexers|mypyc?|pip|setuptools|.*/tests?'
    "$venv/bin/python" -m compileall -qq -j 0 -x "site-packages/($rare)/" "$venv"/lib/python3*/site-packages || true
fi

echo "$want $kind $locked" >"$stamp"
printf '\nSet-up is complete.\n'
