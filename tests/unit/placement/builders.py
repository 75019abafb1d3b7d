"""Plain clusters, models and requests for tests."""

from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise

from services.common.addresses import HostPort
from services.placement.domain.candidates import Candidates, Download, candidates_of
from services.placement.domain.cluster import (
    Backend,
    Cluster,
    Link,
    LinkKind,
    Node,
    cluster_of,
)
from services.placement.domain.model import Model
from services.placement.domain.request import PlacementRequest, request_of


def node(
    node_id: str, memory: int = 1000, *, backends: tuple[Backend, ...] = (Backend.METAL,)
) -> Node:
    return Node(
        node_id=node_id,
        name=f"name-of-{node_id}",
        memory_available_bytes=memory,
        backends=backends,
        endpoints=(HostPort(address_of(node_id), 52420),),
    )


def address_of(node_id: str) -> str:
    """A different address for each of the ids "a" to "z"."""
    return f"10.0.0.{ord(node_id[-1])}"


def one_way(source: str, sink: str, hop: int | None = None) -> Link:
    return Link(source, sink, address_of(sink), LinkKind.ETHERNET, hop)


def both_ways(a: str, b: str, hop: int | None = None) -> list[Link]:
    return [one_way(a, b, hop), one_way(b, a, hop)]


def mesh(node_ids: Iterable[str]) -> list[Link]:
    ids = list(node_ids)
    return [one_way(a, b) for a in ids for b in ids if a != b]


def cluster(
    memory: Mapping[str, int], links: Iterable[Link] | None = None, *, gathering: bool = False
) -> Cluster:
    """Nodes by memory, in full mesh unless links are given."""
    return cluster_of(
        [node(node_id, have) for node_id, have in memory.items()],
        mesh(memory) if links is None else links,
        gathering=gathering,
    )


def model(
    layer_bytes: Iterable[int] = (10,) * 12,
    *,
    embedding: int = 0,
    head: int = 0,
    tied: int = 0,
    engine_supported: bool = True,
    cuts: Iterable[int] | None = None,
) -> Model:
    """`cuts`: the layers a stage may begin at; those that the model does not have do not count."""
    layers = tuple(layer_bytes)
    return Model(
        model_id="org/model",
        commit="c0ffee",
        model_type="llama",
        engine_supported=engine_supported,
        layer_bytes=layers,
        embedding_bytes=embedding,
        head_bytes=head,
        weight_bytes=sum(layers) + embedding + head - tied,
        cuts=None if cuts is None else frozenset(range(1, len(layers))).intersection(cuts),
        cut_obstacle="" if cuts is None else "a reason",
    )


def request(
    min_node_count: int = 1,
    *,
    required: Iterable[str] = (),
    excluded: Iterable[str] = (),
    request_id: str = "r-1",
) -> PlacementRequest:
    return request_of(
        model_id="org/model",
        min_node_count=min_node_count,
        required=tuple(required),
        excluded=tuple(excluded),
        request_id=request_id,
    )


def candidates(
    of: Cluster,
    downloads: Mapping[str, Download] | None = None,
    asked: PlacementRequest | None = None,
) -> Candidates:
    return candidates_of(of, downloads or {}, asked or request())


def every_split(layer_count: int, rank_count: int) -> list[tuple[int, ...]]:
    """All ways to give each rank at least one layer."""
    return [
        tuple(end - start for start, end in pairwise((0, *cuts, layer_count)))
        for cuts in combinations(range(1, layer_count), rank_count - 1)
    ]
