"""Cutting a model into stages: in proportion to memory, never above what a node can hold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from services.placement.domain.model import Model

# More layers than any model has.
ANY_LAYER_COUNT = 1 << 20


@dataclass(frozen=True)
class Room:
    """What one node can take: memory, and how many layers it may and must hold."""

    memory_bytes: int
    least_layers: int = 1
    most_layers: int = ANY_LAYER_COUNT


def proportional(layer_count: int, memory_bytes: Sequence[int]) -> list[int]:
    """Share layers in proportion to memory, at least one a node.

    By largest remainder (ties: the earlier node); what a node without a layer is given comes
    from the node with most layers. Needs layer_count >= len(memory_bytes) and memory above 0.
    """
    total = sum(memory_bytes)
    counts = [layer_count * memory // total for memory in memory_bytes]
    by_remainder = sorted(
        range(len(counts)), key=lambda i: -(layer_count * memory_bytes[i] % total)
    )
    for i in by_remainder[: layer_count - sum(counts)]:
        counts[i] += 1
    for i, count in enumerate(counts):
        if count == 0:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    return counts


def stages_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the stages [start, end) of consecutive ranks with these layer counts."""
    return list(pairwise(accumulate(counts, initial=0)))


def fits(model: Model, rooms: Sequence[Room], counts: Sequence[int]) -> bool:
    """Say whether every rank can hold its stage, and the model may be cut so."""
    if model.cuts is not None and not model.cuts.issuperset(accumulate(counts[:-1])):
        return False
    return all(
        model.stage_bytes(start, end) <= room.memory_bytes
        and room.least_layers <= end - start <= room.most_layers
        for room, (start, end) in zip(rooms, stages_of(counts), strict=True)
    )


def can_split(model: Model, rooms: Sequence[Room]) -> bool:
    """Say whether any split over ranks with this room, in this order, fits.

    Filling each rank to the brim would not do: where layers differ, the next rank may hold the
    layer before the cut but not the one after it.
    """
    last = len(rooms) - 1
    if last == 0:
        return fits(model, rooms, [model.layer_count])
    if model.layers_are_equal and model.cuts is None:
        return _can_split_equal(model, rooms)
    # Where the ranks so far can end, ascending.
    reached = [0]
    for rank, room in enumerate(rooms):
        following: list[int] = []
        end, limit = 0, model.layer_count - (last - rank)
        for start in reached:
            # A later start reaches at least as far, so each end is looked at once.
            end = max(end, start + room.least_layers - 1)
            most = min(limit, start + room.most_layers)
            while end < most and model.stage_bytes(start, end + 1) <= room.memory_bytes:
                end += 1
                if model.cuts is None or end in model.cuts or end == model.layer_count:
                    following.append(end)
        reached = following
    return bool(reached) and reached[-1] == model.layer_count


def _can_split_equal(model: Model, rooms: Sequence[Room]) -> bool:
    """Say the same where all layers are as large: how many each of two and more ranks can take then
    depends on no other rank."""
    layer = model.layer_bytes[0] + model.cache_bytes_per_layer
    least = most = 0
    for rank, room in enumerate(rooms):
        have = room.memory_bytes
        if rank == 0:
            have -= model.embedding_bytes
        if rank == len(rooms) - 1:
            have -= model.head_bytes
        taken = min(room.most_layers, have // layer)
        if taken < max(1, room.least_layers):
            return False
        least, most = least + max(1, room.least_layers), most + taken
    return least <= model.layer_count <= most


def split(model: Model, rooms: Sequence[Room]) -> list[int] | None:
    """Return the layers of each rank, or None when no split fits.

    The proportional split where it fits; else the excess of overfilled ranks moves to ranks with
    room, so that the squared differences from the proportional split are smallest in sum: the
    excess spreads evenly and nothing else moves without need.
    """
    wanted = _wanted(model, rooms)
    if fits(model, rooms, wanted):
        return wanted
    if not can_split(model, rooms):
        return None
    return _nearest(model, rooms, wanted)


def _wanted(model: Model, rooms: Sequence[Room]) -> list[int]:
    return proportional(model.layer_count, [room.memory_bytes for room in rooms])


def _nearest(model: Model, rooms: Sequence[Room], wanted: Sequence[int]) -> list[int]:
    """Return the fitting split nearest to `wanted`; one exists."""
    rank_count = len(rooms)
    # reached[end]: the cheapest way to give the ranks so far the layers [0, end).
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank, room in enumerate(rooms):
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        limit = model.layer_count - (rank_count - 1 - rank)
        for start, (cost, counts) in reached.items():
            # Only the last rank, and it always, ends at the last layer.
            first_end = start + room.least_layers
            if rank == rank_count - 1:
                first_end = max(limit, first_end)
            for end in model.stage_ends(first_end, min(limit, start + room.most_layers)):
                if model.stage_bytes(start, end) > room.memory_bytes:
                    break
                new = cost + (end - start - wanted[rank]) ** 2
                if end not in following or new < following[end][0]:
                    following[end] = (new, (*counts, end - start))
        reached = following
    return list(reached[model.layer_count][1])


def rank_order(
    model: Model, ring: Sequence[str], rooms: Mapping[str, Room]
) -> tuple[tuple[str, ...], list[int]] | None:
    """Choose which node of a ring is rank 0 and which way round; return that order and its split.

    `ring` starts at the smallest node id and goes on to the smaller of its two neighbours. It is
    taken as it is if the proportional split fits so; else the first turn of it, then of its
    mirror image, in which it does; else the first in which any split fits (the ends hold the
    embedding and the head, so turning matters). None when no turn fits.
    """
    for turn in _turns(ring):
        turned = [rooms[node_id] for node_id in turn]
        counts = _wanted(model, turned)
        if fits(model, turned, counts):
            return turn, counts
    for turn in _turns(ring):
        nearest = split(model, [rooms[node_id] for node_id in turn])
        if nearest is not None:
            return turn, nearest
    return None


def ring_fits(model: Model, ring: Sequence[str], rooms: Mapping[str, Room]) -> bool:
    """Say whether `rank_order` would find an order."""
    for turn in _turns(ring):
        turned = [rooms[node_id] for node_id in turn]
        # Most often the split by memory fits, which is quickly seen.
        if fits(model, turned, _wanted(model, turned)):
            return True
        if can_split(model, turned):
            return True
    return False


def _turns(ring: Sequence[str]) -> Iterator[tuple[str, ...]]:
    forward = tuple(ring)
    mirrored = (forward[0], *reversed(forward[1:]))
    for order in [forward] if len(forward) < 3 else [forward, mirrored]:
        for i in range(len(order)):
            yield order[i:] + order[:i]
