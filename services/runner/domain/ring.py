"""A placement as the runner needs it, and the checks it has to pass."""

from dataclasses import dataclass

from services.common.addresses import (
    HostPort,
    check_reachable,
    is_ip_address,
    parse_host_port,
)
from services.common.errors import ShardringError, invalid_field


@dataclass(frozen=True)
class Rank:
    """What one rank is given. `layers` is [start, end); `hosts` its own MLX host list."""

    rank: int
    node_id: str
    node_name: str
    endpoints: tuple[HostPort, ...]
    layers: tuple[int, int]
    hosts: tuple[str, ...]
    weight_bytes: int
    # Set aside for key-value caches.
    cache_bytes: int = 0

    @property
    def promised_bytes(self) -> int:
        """The memory that nobody else may be promised."""
        return self.weight_bytes + self.cache_bytes

    @property
    def ring_port(self) -> int | None:
        """The port it takes for the ring; None on a ring of one."""
        return parse_host_port(self.hosts[self.rank]).port if self.hosts else None


@dataclass(frozen=True)
class InstanceOptions:
    """How key-value caches are kept: bits a value (0: as computed), tokens at most (0: all)."""

    cache_bits: int = 0
    max_cache_tokens: int = 0


@dataclass(frozen=True)
class Ring:
    """A placement: a model and the ranks that run it.

    `document` is the placement as it was given, for handing on in full.
    """

    model_id: str
    commit: str
    layer_count: int
    ranks: tuple[Rank, ...]
    document: bytes = b""
    # True: every rank holds a part of every layer. False: each holds whole layers of its own.
    is_tensor: bool = False
    # False: the ranks would talk over something else than MLX's TCP ring.
    is_mlx_ring: bool = True
    options: InstanceOptions = InstanceOptions()

    @property
    def head(self) -> Rank:
        """The rank that clients talk to."""
        return self.ranks[0]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def others(self, rank: int) -> tuple[Rank, ...]:
        """Return every rank but this one."""
        return tuple(other for other in self.ranks if other.rank != rank)


def check_ring(ring: Ring) -> None:
    """Raise ShardringError(INVALID_FIELD) unless the ranks form a ring that holds the model."""
    if not ring.model_id:
        raise invalid_field("placement.model_id", "", "a model id")
    if not 1 <= ring.world_size <= 1024:
        raise invalid_field("placement.ranks", ring.world_size, "1 to 1024 ranks")
    if len({rank.node_id for rank in ring.ranks}) != ring.world_size:
        raise invalid_field("placement.ranks.node_id", "repeated", "each node once")
    if ring.options.cache_bits not in (0, 4, 8):
        raise invalid_field("options.cache_bits", ring.options.cache_bits, "0, 4 or 8")
    if not 0 <= ring.options.max_cache_tokens <= 2**30:
        tokens = ring.options.max_cache_tokens
        raise invalid_field("options.max_cache_token_count", tokens, "0 to 2^30")
    if ring.options.cache_bits and ring.options.max_cache_tokens:
        tokens = ring.options.max_cache_tokens
        why = "0 with options.cache_bits: mlx-lm quantizes no caches that forget"
        raise invalid_field("options.max_cache_token_count", tokens, why)
    if not ring.is_mlx_ring:
        raise invalid_field("placement.ring_backend", "JACCL", "MLX_RING, the one this node runs")
    at = 0
    for index, rank in enumerate(ring.ranks):
        field = f"placement.ranks[{index}]"
        if rank.rank != index:
            raise invalid_field(f"{field}.rank", rank.rank, str(index))
        _check_node(field, rank)
        start, end = rank.layers
        if ring.is_tensor:
            at = 0
        if start != at or end <= start:
            raise invalid_field(f"{field}.layers", f"[{start}, {end})", f"a range from {at} on")
        at = end
        if ring.is_tensor and end != ring.layer_count:
            raise invalid_field(f"{field}.layers", f"[{start}, {end})", "all layers, with TENSOR")
        expected = 0 if ring.world_size == 1 else ring.world_size
        if len(rank.hosts) != expected:
            raise invalid_field(f"{field}.hosts", len(rank.hosts), f"{expected} entries")
    if at != ring.layer_count:
        raise invalid_field("placement.layer_count", ring.layer_count, f"{at}, as the ranks hold")
    _check_hosts(ring)


def _check_node(field: str, rank: Rank) -> None:
    if not rank.node_id:
        raise invalid_field(f"{field}.node_id", "", "a node id")
    if rank.weight_bytes < 0:
        raise invalid_field(f"{field}.weight_bytes", rank.weight_bytes, "0 or more")
    if rank.cache_bytes < 0:
        raise invalid_field(f"{field}.cache_bytes", rank.cache_bytes, "0 or more")
    if not rank.endpoints:
        raise invalid_field(f"{field}.endpoints", "none", "at least one")
    for index, endpoint in enumerate(rank.endpoints):
        check_reachable(f"{field}.endpoints[{index}]", endpoint)


def _check_hosts(ring: Ring) -> None:
    """Check that every rank dials its neighbours where they listen.

    MLX would wait for the others until a deadline, and not say why.
    """
    own_ports = {}
    for rank in ring.ranks if ring.world_size > 1 else ():
        field = f"placement.ranks[{rank.rank}].hosts"
        entries = [_ip_and_port(f"{field}[{i}]", text) for i, text in enumerate(rank.hosts)]
        own_ports[rank.rank] = entries[rank.rank].port
        for i in {(rank.rank + step) % ring.world_size for step in (-1, 0, 1)}:
            check_reachable(f"{field}[{i}]", entries[i])
    for rank in ring.ranks if ring.world_size > 1 else ():
        for i in {(rank.rank + step) % ring.world_size for step in (-1, 1)}:
            if parse_host_port(rank.hosts[i]).port != own_ports[i]:
                raise invalid_field(
                    f"placement.ranks[{rank.rank}].hosts[{i}]",
                    rank.hosts[i],
                    f"port {own_ports[i]}, on which rank {i} listens",
                )


def _ip_and_port(field: str, text: str) -> HostPort:
    expected = "an IP address and a port, such as 192.0.2.1:61000"
    try:
        entry = parse_host_port(text)
    except ShardringError as error:
        raise invalid_field(field, text, expected) from error
    if not is_ip_address(entry.host):
        raise invalid_field(field, text, expected)
    return entry
