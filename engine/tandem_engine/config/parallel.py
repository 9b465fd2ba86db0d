"""The ranks of an engine, and the machines that they run on."""

from dataclasses import dataclass

from tandem_engine.base.addresses import Address, AddressError
from tandem_engine.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many processes share one engine's model, and on how many machines (nodes)."""

    tp_size: int = 1
    """Ranks that each hold a part of every layer."""
    timeout: float = 120.0
    """Seconds that a rank waits for another: at start, and within a model step."""
    nnodes: int = 1
    """Machines, with as many ranks each."""
    node_rank: int = 0
    """Which of them this is. Node 0 leads: it has rank 0."""
    dist_init_addr: str = ""
    """host:port at which node 0 is reached by the others, the same text on all of them."""
    init_timeout: float = 600.0
    """Seconds that nodes wait for each other at start."""

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, got {self.tp_size}")
        for flag, seconds in (("--dist-timeout", self.timeout), ("--dist-init-timeout", self.init_timeout)):
            if not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{flag} must be a number of seconds above 0, got {seconds:g}")
        self._check_nodes()

    def _check_nodes(self) -> None:
        if self.nnodes < 1 or self.tp_size % self.nnodes:
            raise ConfigError(
                f"--nnodes must be at least 1 and divide --tensor-parallel-size {self.tp_size}, got {self.nnodes}: "
                "each node has as many ranks"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank must be below --nnodes {self.nnodes}, from 0 upwards, got {self.node_rank}")
        if self.nnodes > 1:
            try:
                Address.parse(self.dist_init_addr)
            except AddressError as error:
                raise ConfigError(
                    f"--dist-init-addr must be HOST:PORT of node 0 with --nnodes {self.nnodes}, "
                    f"got {self.dist_init_addr!r}: {error}"
                ) from error
        if self.nnodes == 1 and self.dist_init_addr:
            raise ConfigError(f"--dist-init-addr {self.dist_init_addr} needs --nnodes above 1")

    @property
    def local_size(self) -> int:
        """Ranks of each node."""
        return self.tp_size // self.nnodes

    def local_rank(self, rank: int) -> int:
        """Which of its node's ranks `rank` is."""
        return rank % self.local_size

    def ranks_of(self, node_rank: int) -> range:
        """Ranks of a node."""
        return range(node_rank * self.local_size, (node_rank + 1) * self.local_size)

    @property
    def init_address(self) -> Address:
        """`dist_init_addr`, with several nodes."""
        return Address.parse(self.dist_init_addr)
