"""TopologyService: convert, call, convert.

The two calls that return whole topologies answer with bytes that `Frames` has at hand; the others
with messages, as usual.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from grpc.aio import ServicerContext

from services.common.server import Registration
from services.topology.app import TopologyApp
from services.topology.domain.model import Link, Topology
from services.topology.rpc.convert import (
    lease_to_proto,
    node_from_proto,
    start_ns_from_proto,
)
from services.topology.rpc.convert_links import link_from_proto, misdirection_from_proto
from services.topology.rpc.frames import EncodedLinks, Frames, encode
from shardring.topology.v1 import topology_service_pb2 as pb
from shardring.topology.v1.topology_service_pb2_grpc import (
    TopologyServiceServicer,
    add_TopologyServiceServicer_to_server,
)

NAME = "shardring.topology.v1.TopologyService"

# How many links are converted before others get their turn: about a tenth of a millisecond, as an
# answer takes several turns.
LINKS_AT_ONCE = 16

Context = ServicerContext[Any, Any]


class TopologyServicer(TopologyServiceServicer):
    """Serves a TopologyApp."""

    def __init__(self, app: TopologyApp) -> None:
        self._app = app
        self._frames = Frames()
        self._reporting = asyncio.Lock()

    async def ReportNode(
        self, request: pb.ReportNodeRequest, context: Context
    ) -> pb.ReportNodeResponse:
        """Renew a node's lease."""
        node = node_from_proto(request.node)
        self._app.report_node(node)
        return lease_to_proto(
            self._app.lease_seconds,
            self._app.heartbeat_seconds,
            self._app.revision,
            links_wanted=self._app.wants_links(node.node_id),
        )

    async def ReportLinks(
        self, request: pb.ReportLinksRequest, context: Context
    ) -> pb.ReportLinksResponse:
        """Replace one source's links."""
        source, now = request.source_node_id, time.monotonic()
        # A report may hold thousands of links: between its parts others get their answers. One
        # report after the other, so that the last one to come is the last one to be taken.
        async with self._reporting:
            links: list[Link] = []
            for start in range(0, len(request.links), LINKS_AT_ONCE):
                part = request.links[start : start + LINKS_AT_ONCE]
                links += [link_from_proto(link, now) for link in part]
                await asyncio.sleep(0)
            misdirections = [misdirection_from_proto(found) for found in request.misdirections]
            self._app.report_links(
                source,
                start_ns_from_proto(request),
                links,
                misdirections,
                probing=request.probing,
            )
            revision = self._app.revision
            served, encoded = self._app.links_of(source), EncodedLinks()
            for start in range(0, len(served), LINKS_AT_ONCE):
                await asyncio.sleep(0)
                encoded |= encode(served[start : start + LINKS_AT_ONCE], now)
            self._frames.keep(served, encoded, self._app.one_way(), now)
        return pb.ReportLinksResponse(revision=revision)

    async def RemoveNode(
        self, request: pb.RemoveNodeRequest, context: Context
    ) -> pb.RemoveNodeResponse:
        """Forget a node."""
        self._app.remove_node(request.node_id)
        return pb.RemoveNodeResponse(revision=self._app.revision)

    async def GetTopology(  # type: ignore[override]
        self, request: pb.GetTopologyRequest, context: Context
    ) -> bytes:
        """Return everything known, unless the caller has it."""
        revision = self._app.revision
        if request.HasField("if_revision_not") and request.if_revision_not == revision:
            return pb.GetTopologyResponse(revision=revision, unchanged=True).SerializeToString()
        return self._frames.answer(revision, self._app.topology(), time.monotonic())

    async def WatchTopology(  # type: ignore[override]
        self, request: pb.WatchTopologyRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Stream a snapshot and changes."""
        after = request.after_revision if request.HasField("after_revision") else None
        events = self._app.watch(after, without_links=request.without_links)
        async with aclosing(events):
            async for revision, event in events:
                now = time.monotonic()
                if isinstance(event, Topology):
                    yield self._frames.snapshot(revision, event, now)
                else:
                    yield self._frames.change(revision, event, now)

    def encoded_handlers(self) -> dict[str, Any]:
        """Return the handlers of the calls that answer with bytes."""
        return {
            "GetTopology": grpc.unary_unary_rpc_method_handler(
                self.GetTopology, request_deserializer=pb.GetTopologyRequest.FromString
            ),
            "WatchTopology": grpc.unary_stream_rpc_method_handler(
                self.WatchTopology, request_deserializer=pb.WatchTopologyRequest.FromString
            ),
        }


def topology_registration(app: TopologyApp) -> Registration:
    """Return TopologyService for `start_server`."""

    servicer = TopologyServicer(app)

    def add(server: grpc.aio.Server) -> None:
        add_TopologyServiceServicer_to_server(servicer, server)
        # These take the place of the ones just added, which would encode what is encoded.
        server.add_registered_method_handlers(NAME, servicer.encoded_handlers())

    return Registration(NAME, add)
