"""How this node reaches other nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """An address at which another node proved who it is, as last measured from here.

    `host` is without brackets. `bytes_per_second` is None where nothing was measured yet.
    """

    host: str
    bytes_per_second: int | None


# Node id -> the verified ways there, best first; none when there is no verified link.
Ways = Callable[[str], Sequence[Way]]


def no_ways(node_id: str) -> Sequence[Way]:
    """Reach no node: everything comes from the hub."""
    return ()
