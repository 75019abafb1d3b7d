"""TopologyService: convert, call, convert."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc.aio import ServicerContext

from services.common.server import Registration
from services.topology.app import TopologyApp
from services.topology.rpc.convert import (
    event_to_proto,
    lease_to_proto,
    link_from_proto,
    node_from_proto,
    start_ns_from_proto,
    topology_to_proto,
)
from shardring.topology.v1 import topology_service_pb2 as pb
from shardring.topology.v1.topology_service_pb2_grpc import (
    TopologyServiceServicer,
    add_TopologyServiceServicer_to_server,
)

Context = ServicerContext[Any, Any]


class TopologyServicer(TopologyServiceServicer):
    """Serves a TopologyApp."""

    def __init__(self, app: TopologyApp) -> None:
        self._app = app

    async def ReportNode(
        self, request: pb.ReportNodeRequest, context: Context
    ) -> pb.ReportNodeResponse:
        """Renew a node's lease."""
        self._app.report_node(node_from_proto(request.node))
        return lease_to_proto(
            self._app.lease_seconds, self._app.heartbeat_seconds, self._app.revision
        )

    async def ReportLinks(
        self, request: pb.ReportLinksRequest, context: Context
    ) -> pb.ReportLinksResponse:
        """Replace one source's links."""
        self._app.report_links(
            request.source_node_id,
            start_ns_from_proto(request),
            [link_from_proto(link) for link in request.links],
        )
        return pb.ReportLinksResponse(revision=self._app.revision)

    async def GetTopology(
        self, request: pb.GetTopologyRequest, context: Context
    ) -> pb.GetTopologyResponse:
        """Return everything known, unless the caller has it."""
        revision = self._app.revision
        if request.HasField("if_revision_not") and request.if_revision_not == revision:
            return pb.GetTopologyResponse(revision=revision, unchanged=True)
        return pb.GetTopologyResponse(
            revision=revision, topology=topology_to_proto(self._app.topology())
        )

    async def WatchTopology(
        self, request: pb.WatchTopologyRequest, context: Context
    ) -> AsyncIterator[pb.WatchTopologyResponse]:
        """Stream a snapshot and changes."""
        after = request.after_revision if request.HasField("after_revision") else None
        async with aclosing(self._app.watch(after)) as events:
            async for revision, event in events:
                yield event_to_proto(revision, event)

    async def RemoveNode(
        self, request: pb.RemoveNodeRequest, context: Context
    ) -> pb.RemoveNodeResponse:
        """Forget a node."""
        self._app.remove_node(request.node_id)
        return pb.RemoveNodeResponse(revision=self._app.revision)


def topology_registration(app: TopologyApp) -> Registration:
    """Return TopologyService for `start_server`."""
    return Registration(
        "shardring.topology.v1.TopologyService",
        lambda server: add_TopologyServiceServicer_to_server(TopologyServicer(app), server),
    )
