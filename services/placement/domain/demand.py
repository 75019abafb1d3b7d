"""What a model, sharded as asked, demands of a ring of one size; all that a search knows of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.placement.domain.candidates import Candidates
from services.placement.domain.model import Model, Sharding
from services.placement.domain.rings import Ring
from services.placement.domain.shards import ring_fits


@dataclass(frozen=True)
class Demand:
    """What is asked of the nodes of a ring."""

    # Nodes that can be part of one at all.
    able: tuple[str, ...]
    # Each pair: an amount by node, and what the ring's nodes must have of it in sum.
    needs: tuple[tuple[Mapping[str, int], int], ...]
    # Whether a ring will do, asked last.
    accept: Callable[[Ring], bool]


def demand_of(candidates: Candidates, model: Model, size: int) -> Demand:
    """Return what `model` demands of a ring of this size."""
    if not model.can_be_cut_for(size):
        return Demand((), ((dict.fromkeys(candidates.node_ids, 0), 1),), lambda ring: False)
    if size > 1 and model.sharding is Sharding.TENSOR:
        return _tensor_demand(candidates, model, size)
    return _pipeline_demand(candidates, model, size)


def sizes_allowed(model: Model, sizes: Sequence[int]) -> list[int]:
    """Return those of some ring sizes that the model can be cut for."""
    return [size for size in sizes if model.can_be_cut_for(size)]


def _tensor_demand(candidates: Candidates, model: Model, size: int) -> Demand:
    share, memory = model.tensor_share_bytes(size), candidates.memory_bytes
    able = tuple(node for node in candidates.node_ids if memory[node] >= share)
    return Demand(able, (), lambda ring: True)


def _pipeline_demand(candidates: Candidates, model: Model, size: int) -> Demand:
    memory, rooms = candidates.memory_bytes, candidates.rooms
    layers = {
        node: min(rooms[node].most_layers, model.most_layers(memory[node]))
        for node in candidates.node_ids
    }
    able = tuple(n for n in candidates.node_ids if layers[n] >= rooms[n].least_layers)
    return Demand(
        able=able,
        needs=(
            (memory, model.needed_bytes),
            (layers, model.layer_count),
            *(_ends(model, able, memory) if size > 1 else ()),
        ),
        accept=lambda ring: (
            sum(memory[node] for node in ring) >= model.needed_bytes
            and ring_fits(model, ring, rooms)
        ),
    )


def _ends(
    model: Model, node_ids: Sequence[str], memory: Mapping[str, int]
) -> Iterator[tuple[Mapping[str, int], int]]:
    """Yield what a ring of two and more needs for its end stages: a node that can hold the first
    layer and the embedding, one for the last layer and the head, and two for both."""
    first, last = (
        model.stage_bytes(0, 1),
        model.stage_bytes(model.layer_count - 1, model.layer_count),
    )
    yield {node: int(memory[node] >= first) for node in node_ids}, 1
    yield {node: int(memory[node] >= last) for node in node_ids}, 1
    yield {node: int(memory[node] >= min(first, last)) for node in node_ids}, 2
