"""A worker service with a mock engine as a process of its own.

python -m tandem_testing.worker_process REDIS_URL REMOTE_SOCKET
"""

import sys

from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.main import run_worker


def worker_config(redis_url: str, remote: str) -> WorkerConfig:
    return WorkerConfig(
        model_path="/nowhere",
        model_name="mini",
        role=Role.DECODE,
        worker_id="w1",
        redis=RedisAddress(url=redis_url),
        redis_start_timeout_s=60.0,
        engine_command=(sys.executable, "-m", "tandem_testing.mock_engine_process"),
        engine_flags=("--remote", remote),
    )


if __name__ == "__main__":
    raise SystemExit(run_worker(worker_config(*sys.argv[1:])))
