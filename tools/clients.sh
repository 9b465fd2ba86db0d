#!/usr/bin/env bash
# Runs the sessions of client libraries that want other versions than the rest of the tests, in a virtual environment
# beside the first one that has all of its packages and these before them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${TANDEM_VENV:-.venv}
clients=$venv-clients
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

stamp=$clients/.tandem-clients
want="$(sha256sum pyproject.toml tools/clients.sh | sha256sum | cut -d' ' -f1) $(realpath "$venv")"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
    [ -x "$clients/bin/python" ] || "$venv/bin/python" -m venv --without-pip "$clients"
    site "$venv" >"$(site "$clients")/tandem.pth"
    "$clients/bin/python" -m pip --disable-pip-version-check install -q -e '.[clients]'
    echo "$want" >"$stamp"
fi
exec "$clients/bin/python" -m pytest tests/integration/test_system_litellm.py "$@"
