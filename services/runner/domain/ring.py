"""A placement as the runner needs it, and the checks it has to pass."""

from dataclasses import dataclass

from services.common.addresses import HostPort
from services.common.errors import invalid_field


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
    at = 0
    for index, rank in enumerate(ring.ranks):
        field = f"placement.ranks[{index}]"
        if rank.rank != index:
            raise invalid_field(f"{field}.rank", rank.rank, str(index))
        if not rank.node_id:
            raise invalid_field(f"{field}.node_id", "", "a node id")
        if not rank.endpoints:
            raise invalid_field(f"{field}.endpoints", "none", "at least one")
        start, end = rank.layers
        if start != at or end <= start:
            raise invalid_field(f"{field}.layers", f"[{start}, {end})", f"a range from {at} on")
        at = end
        expected = 0 if ring.world_size == 1 else ring.world_size
        if len(rank.hosts) != expected:
            raise invalid_field(f"{field}.hosts", len(rank.hosts), f"{expected} entries")
    if at != ring.layer_count:
        raise invalid_field("placement.layer_count", ring.layer_count, f"{at}, as the ranks hold")
