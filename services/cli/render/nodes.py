"""The machines of the cluster, and the links between them."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from services.cli.names import names_of_nodes
from services.cli.render.tables import Cell, add_row, bar, dim, new_table
from services.cli.text import age, duration, size, speed
from services.common.addresses import HostPort
from shardring.common.v1 import common_pb2
from shardring.topology.v1 import topology_pb2

# More nodes than this do not fit a terminal side by side.
MATRIX_NODES = 16
_KIND_STYLES = {
    topology_pb2.INTERFACE_KIND_THUNDERBOLT: "green",
    topology_pb2.INTERFACE_KIND_WIFI: "yellow",
    topology_pb2.INTERFACE_KIND_OVERLAY: "red",
}


def nodes_table(nodes: Sequence[topology_pb2.Node], *, now: float) -> Table:
    """Return one row a node, by name. `now`: seconds since the epoch."""
    names = names_of_nodes(nodes)
    table = new_table("NODE", "ID", "ADDRESS", ">MEMORY", ">AVAILABLE", "", "BACKENDS", ">SEEN")
    for node in sorted(nodes, key=lambda node: (node.name, node.node_id)):
        available, total = node.memory_available_bytes, node.memory_total_bytes
        add_row(
            table,
            names.label(node.node_id),
            names.short_id(node.node_id),
            _addresses(node.endpoints),
            size(total),
            size(available),
            bar(available / total if total else 0.0, 6),
            ", ".join(backend_name(backend) for backend in node.backends) or dim("none"),
            f"{age(now - node.last_report_time.ToNanoseconds() / 1e9)} ago",
        )
    return table


def links_table(topology: topology_pb2.Topology) -> Table:
    """Return one row a link, by names and address; says where the way back is missing.

    Round trips are the usual ones (median of the last probes), speeds those of the last burst.
    """
    names = names_of_nodes(topology.nodes)
    pairs = {(link.source_node_id, link.sink_node_id) for link in topology.links}
    rows = sorted(
        (names.label(link.source_node_id), names.label(link.sink_node_id), link.sink_address, index)
        for index, link in enumerate(topology.links)
    )
    table = new_table("FROM", "TO", "ADDRESS", "KIND", ">ROUND TRIP", ">SPEED", ">MEASURED", "")
    for source, sink, address, index in rows:
        link = topology.links[index]
        both_ways = (link.sink_node_id, link.source_node_id) in pairs
        add_row(
            table,
            source,
            sink,
            address,
            kind_name(link.kind),
            duration(round_trip_seconds(link)),
            speed(link.throughput_bytes_per_second) if _measured(link) else dim("-"),
            f"{age(link.throughput_age.ToNanoseconds() / 1e9)} ago" if _measured(link) else "",
            Text(link.rdma_device) if both_ways else Text("one-way", style="bold red"),
        )
    return table


def links_matrix(topology: topology_pb2.Topology) -> Table:
    """Return who reaches whom: from the node of the row to that of the column, each figure that
    of the fastest link. A speed where one was measured, else a round trip."""
    names = names_of_nodes(topology.nodes)
    nodes = sorted(topology.nodes, key=lambda node: (node.name, node.node_id))
    best: dict[tuple[str, str], topology_pb2.Link] = {}
    for link in topology.links:
        pair = (link.source_node_id, link.sink_node_id)
        if pair not in best or _speed_order(link) < _speed_order(best[pair]):
            best[pair] = link
    table = new_table("FROM \\ TO", *(f">{names.label(node.node_id)}" for node in nodes))
    for row in nodes:
        cells: list[Cell] = [names.label(row.node_id)]
        for column in nodes:
            found = best.get((row.node_id, column.node_id))
            back = (column.node_id, row.node_id) in best
            if found is None:
                text = "" if row is column else "-"
                cells.append(Text(text, style="bold red" if back else "dim"))
            else:
                cells.append(Text(_figure(found), style=_KIND_STYLES.get(found.kind, "")))
        add_row(table, *cells)
    return table


def round_trip_seconds(link: topology_pb2.Link) -> float:
    """Return the usual round trip: the median, or the fastest where there is no median."""
    field = link.round_trip_median if link.HasField("round_trip_median") else link.round_trip
    return field.ToNanoseconds() / 1e9


def backend_name(backend: common_pb2.Backend.ValueType) -> str:
    """Return a backend's name: "metal"; of one this program doesn't know, its number."""
    known = common_pb2.Backend.values()
    if backend not in known:
        return str(backend)
    return common_pb2.Backend.Name(backend).removeprefix("BACKEND_").lower()


def kind_name(kind: topology_pb2.InterfaceKind.ValueType) -> str:
    """Return an interface kind's name: "maybe ethernet"; of one not known here, its number."""
    if kind not in topology_pb2.InterfaceKind.values():
        return str(kind)
    name = topology_pb2.InterfaceKind.Name(kind).removeprefix("INTERFACE_KIND_")
    return name.replace("_", " ").lower()


def _measured(link: topology_pb2.Link) -> bool:
    return link.HasField("throughput_bytes_per_second")


def _speed_order(link: topology_pb2.Link) -> tuple[float, float]:
    return (-link.throughput_bytes_per_second, round_trip_seconds(link))


def _figure(link: topology_pb2.Link) -> str:
    if _measured(link):
        return speed(link.throughput_bytes_per_second)
    return duration(round_trip_seconds(link))


def _addresses(endpoints: Sequence[common_pb2.Endpoint]) -> str:
    """Return the best address, and how many more there are."""
    if not endpoints:
        return "-"
    more = f" +{len(endpoints) - 1}" if len(endpoints) > 1 else ""
    return f"{HostPort(endpoints[0].address, endpoints[0].port)}{more}"
