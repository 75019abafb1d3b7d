"""Clusters of several shapes and kinds for the placement benchmark, the same in every run."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import networkx as nx

from services.common.addresses import HostPort
from services.placement.domain.candidates import Candidates, Download, DownloadState, candidates_of
from services.placement.domain.cluster import Backend, Cluster, Link, LinkKind, Node, cluster_of
from services.placement.domain.model import Model
from services.placement.domain.request import request_of

GB = 10**9
LAYER_BYTES = GB
MODEL_ID = "org/model"


@dataclass(frozen=True)
class Kind:
    """What differs from node to node and from link to link."""

    name: str
    # False: no link is measured, so that all hops are equal. True: random, all different.
    measured: bool
    # False: every node has the same memory.
    uneven_memory: bool
    # Whether random parts of the model are on some nodes' disks.
    downloads: bool


KINDS = (
    Kind("all equal", measured=False, uneven_memory=False, downloads=False),
    Kind("memory differs", measured=False, uneven_memory=True, downloads=False),
    Kind("hops differ", measured=True, uneven_memory=False, downloads=False),
    Kind("both differ", measured=True, uneven_memory=True, downloads=False),
    Kind("all differ, downloads", measured=True, uneven_memory=True, downloads=True),
)


@dataclass(frozen=True)
class Case:
    """A cluster and what is on its disks."""

    cluster: Cluster
    downloads: dict[str, Download]

    @property
    def candidates(self) -> Candidates:
        """What the search is given where nothing is required or excluded."""
        return candidates_of(self.cluster, self.downloads, request_of(model_id=MODEL_ID))


def case_of(count: int, pairs: Iterable[tuple[int, int]], kind: Kind, seed: int) -> Case:
    """Return nodes linked both ways by these pairs."""
    chance = random.Random(seed)
    nodes = [_node(i, kind, chance) for i in range(count)]
    links = [link for a, b in pairs for link in _links(a, b, kind, chance)]
    downloads = {}
    if kind.downloads:
        for i in range(count):
            part = chance.choice((0, 0, chance.randrange(GB), GB))
            downloads[node_id(i)] = Download(DownloadState.UNFINISHED, part, GB)
    return Case(cluster_of(nodes, links), downloads)


def mesh(count: int, kind: Kind, seed: int = 1) -> Case:
    """Return nodes that are all linked with each other."""
    return case_of(count, combinations(range(count), 2), kind, seed)


def shapes(count: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield sparse graphs of about so many nodes: name, linked pairs."""
    yield "ring", [(i, (i + 1) % count) for i in range(count)]
    yield "line", [(i, i + 1) for i in range(count - 1)]
    yield "star", [(0, i) for i in range(1, count)]
    width = 8
    grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(width, count // width))
    yield "grid", sorted(grid.edges)
    for degree in range(3, 9):
        yield f"degree {degree}", sorted(nx.random_regular_graph(degree, count, seed=degree).edges)


def model_for(case: Case, node_count: int) -> Model:
    """Return a model that fits on as many of the nodes, in full mesh, and on no fewer."""
    memory = sorted((n.memory_available_bytes for n in case.cluster.nodes.values()), reverse=True)
    layers = [have // LAYER_BYTES for have in memory[:node_count]]
    # Half of what the last of the largest nodes can hold is needed.
    return model_of(sum(layers[:-1]) + max(1, layers[-1] // 2))


def model_of(layer_count: int) -> Model:
    """Return a model of equal layers."""
    layers = (LAYER_BYTES,) * layer_count
    return Model(MODEL_ID, "c0ffee", "llama", True, layers, 0, 0, sum(layers))


def node_id(number: int) -> str:
    """Return the id of a node; ids order as numbers do."""
    return f"{number:032x}"


def address_of(number: int) -> str:
    """Return the address of a node."""
    return f"10.1.{number // 250}.{number % 250 + 1}"


def _node(number: int, kind: Kind, chance: random.Random) -> Node:
    memory = 16 * GB
    if kind.uneven_memory:
        memory = chance.randrange(12 * GB, 20 * GB)
    return Node(
        node_id=node_id(number),
        name=f"studio-{number}",
        memory_available_bytes=memory,
        backends=(Backend.METAL,),
        endpoints=(HostPort(address_of(number), 52420),),
    )


def _links(a: int, b: int, kind: Kind, chance: random.Random) -> Iterator[Link]:
    for source, sink in ((a, b), (b, a)):
        yield Link(
            source=node_id(source),
            sink=node_id(sink),
            address=address_of(sink),
            kind=LinkKind.ETHERNET,
            round_trip_nanoseconds=chance.randrange(50_000, 900_000) if kind.measured else None,
            throughput_bytes_per_second=(
                chance.randrange(10**8, 5 * 10**9) if kind.measured else None
            ),
        )
