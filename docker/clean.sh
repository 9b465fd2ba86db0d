#!/bin/sh
# Last step of what installs Debian packages: removes what differs between two builds of equal packages.
#
# An image's files have one date (docker/build.sh), so bytecode is not compared with the dates of its sources: otherwise each start
# would compile Debian's Python again.
set -eu
find /var/log /var/cache/apt /var/cache/ldconfig -type f -delete
rm -rf /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/lib/systemd/deb-systemd* /tmp/* /root/.cache
if command -v python3 >/dev/null; then
    find /usr/lib/python3* /usr/share/python3 -name __pycache__ -prune -exec rm -rf {} +
    python3 -m compileall -q -j 1 --invalidation-mode unchecked-hash /usr/lib/python3* /usr/share/python3
fi
