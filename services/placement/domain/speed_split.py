"""The fastest way to cut a model over nodes in a given rank order. Exact."""

from collections.abc import Mapping, Sequence

from services.placement.domain.request import Objective
from services.placement.domain.shards import Room
from services.placement.domain.speed import SECOND, Pace


class Stages:
    """What stages cost on some nodes, at hand for searches that ask very often."""

    def __init__(self, pace: Pace, rooms: Mapping[str, Room]) -> None:
        self.pace, self.rooms = pace, rooms
        self.layer_count = pace.model.layer_count
        # By layer: what all before it read; at the end with the head.
        self.read = [pace.model.read_bytes(0, end) for end in range(self.layer_count + 1)]
        self._furthest: dict[str, list[int]] = {}

    def speed(self, node_id: str) -> int:
        """Return how many bytes of weights a node reads per second."""
        return self.pace.cluster.nodes[node_id].weight_bytes_per_second

    def furthest(self, node_id: str) -> list[int]:
        """Return by first layer how far a stage on the node can go; the layer itself: nowhere."""
        if node_id not in self._furthest:
            room, model = self.rooms[node_id], self.pace.model
            ends, end = [], 0
            for start in range(self.layer_count):
                end = max(end, start)
                most = min(self.layer_count, start + room.most_layers)
                # From a later start it reaches at least as far.
                while end < most and model.stage_bytes(start, end + 1) <= room.memory_bytes:
                    end += 1
                ends.append(min(end, most))
            self._furthest[node_id] = ends
        return self._furthest[node_id]


def split_by_speed(
    stages: Stages, order: Sequence[str], objective: Objective, below: int | None = None
) -> list[int] | None:
    """Return the layers of each rank, or None when no split fits.

    For latency the split whose stages take least in sum: as many layers as fit on the fastest
    nodes. For throughput the one whose slowest stage is fastest, and of those the one that takes
    least in sum. With `below`, only what is better than that will do.
    """
    if objective is not Objective.THROUGHPUT:
        best = _best(stages, order, in_sum=True, below=below)
        return best and best[1]
    slowest = _best(stages, order, in_sum=False, below=below)
    if slowest is None:
        return None
    best = _best(stages, order, in_sum=True, limit=slowest[0])
    return best and best[1]


def _best(
    stages: Stages,
    order: Sequence[str],
    *,
    in_sum: bool,
    below: int | None = None,
    limit: int | None = None,
) -> tuple[int, list[int]] | None:
    """Return the least that stages come to, in sum or at the most, and the split.

    Only a result below `below` counts, of stages that take `limit` at most.
    """
    read, last = stages.read, len(order) - 1
    # More than anything takes.
    below = 1 << 100 if below is None else below
    limit = 1 << 100 if limit is None else limit
    speeds, ends = [stages.speed(node_id) for node_id in order], stages.pace.model.stage_ends
    # reached[end]: the best way to give the ranks so far the layers [0, end).
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank, node_id in enumerate(order):
        furthest, least = stages.furthest(node_id), stages.rooms[node_id].least_layers
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        # Each later rank needs a layer; the last one takes all that is left.
        most_end = stages.layer_count - (last - rank)
        speed, later = speeds[rank], speeds[rank + 1 :]
        # What the rest takes at least: on the fastest of the later ranks, or on all at once.
        rest = (max(later) if in_sum else sum(later)) if later else 0
        for start, (cost, counts) in reached.items():
            first_end = start + least
            if rank == last:
                first_end = max(first_end, most_end)
            for end in ends(first_end, min(most_end, furthest[start])):
                time = max(1, (read[end] - read[start]) * SECOND // speed)
                new = cost + time if in_sum else max(cost, time)
                if time > limit or new >= below:
                    break
                if rest:
                    # Of each stage a fraction of a nanosecond may be lost.
                    more = (read[-1] - read[end]) * SECOND // rest - len(later)
                    if (new + more if in_sum else more) >= below:
                        continue
                known = following.get(end)
                if known is None or new < known[0]:
                    following[end] = (new, (*counts, end - start))
        reached = following
    if stages.layer_count not in reached:
        return None
    cost, counts = reached[stages.layer_count]
    return cost, list(counts)
