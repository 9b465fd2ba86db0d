"""A gateway that is connected to no worker before a request needs it, as one of a large fleet is to most workers.

It takes the flags of `tandem gateway`.
"""

import sys

from tandem_services.cli.main import main
from tandem_services.gateway.dispatch import engine_pool

if __name__ == "__main__":
    engine_pool.AHEAD = 0
    sys.exit(main(["gateway", *sys.argv[1:]]))
