"""The cluster as a client sees it: its services and its nodes' runners, by address."""

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from services.cli.joining import (
    DOWNLOADS_PORT,
    LOCAL,
    PLACEMENT_PORT,
    TOPOLOGY_PORT,
    found,
    told,
)
from services.cli.runner_client import RunnerClient
from services.common.addresses import HostPort, parse_host_port
from services.common.channel import Remote
from services.common.errors import invalid_field
from services.common.options import option
from services.common.security import TlsOptions
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from shardring.placement.v1 import placement_pb2, placement_service_pb2
from shardring.placement.v1.placement_service_pb2_grpc import PlacementServiceStub
from shardring.topology.v1 import topology_pb2, topology_service_pb2
from shardring.topology.v1.topology_service_pb2_grpc import TopologyServiceStub

QUICK_SECONDS = 5.0
# Placement and downloads may have to read a model's facts from the hub first.
HUB_SECONDS = 60.0
_PAGE_SIZE = 1000


@dataclass(frozen=True)
class ClientOptions(TlsOptions):
    """Where a client finds the cluster."""

    cluster: str = option(
        "",
        "Host that runs the cluster's services. If not named here nor in the file `join` of the "
        "data folder: this machine, or else the one found on the LAN.",
        env="SHARDRING_CLUSTER",
    )
    topology: str = option(
        "", "Address of the topology service, if elsewhere.", env="SHARDRING_TOPOLOGY"
    )
    placement: str = option(
        "", "Address of the placement service, if elsewhere.", env="SHARDRING_PLACEMENT"
    )
    downloads: str = option(
        "", "Address of the downloads service, if elsewhere.", env="SHARDRING_DOWNLOADS"
    )
    cluster_name: str = option(
        "", "Which cluster to take, of those found on the LAN.", env="SHARDRING_CLUSTER_NAME"
    )
    data_dir: str = option(
        "~/.shardring", "Folder that may hold the file `join`.", env="SHARDRING_DATA_DIR"
    )


async def located(options: ClientOptions) -> ClientOptions:
    """Return options that name the cluster's addresses, if need be after looking for it.

    Raises what `services.cli.joining` does.
    """
    if options.cluster or options.topology:
        return options
    services = told("", options.data_dir) or await found(options.cluster_name)
    return replace(
        options,
        topology=str(services.topology),
        placement=options.placement or str(services.placement),
        downloads=options.downloads or str(services.downloads),
    )


class Cluster:
    """Calls the cluster's services. Every method raises the ShardringError that the service meant,
    or SERVICE_UNAVAILABLE or SERVICE_TIMEOUT naming it."""

    def __init__(self, options: ClientOptions) -> None:
        """Raises INVALID_FIELD for an address that is none. Connects to nothing yet."""
        host = _host(options.cluster or LOCAL)
        self._topology = Remote("topology", [_address(options.topology, host, TOPOLOGY_PORT)])
        self._placement = Remote("placement", [_address(options.placement, host, PLACEMENT_PORT)])
        self._downloads = Remote("downloads", [_address(options.downloads, host, DOWNLOADS_PORT)])
        self._topology_stub = TopologyServiceStub(self._topology.channel)
        self._placement_stub = PlacementServiceStub(self._placement.channel)
        self._downloads_stub = DownloadsServiceStub(self._downloads.channel)
        self._runners: dict[str, RunnerClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        remotes = [self._topology, self._placement, self._downloads]
        remotes += [runner.remote for runner in self._runners.values()]
        await asyncio.gather(*(remote.close() for remote in remotes))

    @property
    def topology_address(self) -> HostPort:
        """Where the topology service is looked for."""
        return parse_host_port(self._topology.address)

    async def topology(self) -> topology_pb2.Topology:
        """Return the live nodes and their links."""
        response = await self._topology.unary(
            self._topology_stub.GetTopology,
            topology_service_pb2.GetTopologyRequest(),
            timeout=QUICK_SECONDS,
        )
        return response.topology

    async def watch_topology(self) -> AsyncGenerator[topology_pb2.Topology, None]:
        """Yield the live nodes and their links as they are, then at each change."""
        request = topology_service_pb2.WatchTopologyRequest()
        stream = self._topology.stream(self._topology_stub.WatchTopology, request)
        async with aclosing(stream):
            async for _ in stream:
                yield await self.topology()

    async def place(self, request: placement_service_pb2.PlaceRequest) -> placement_pb2.Placement:
        """Return a placement."""
        response = await self._placement.unary(
            self._placement_stub.Place, request, timeout=HUB_SECONDS
        )
        return response.placement

    async def preview_placements(
        self, request: placement_service_pb2.PreviewPlacementsRequest
    ) -> placement_service_pb2.PreviewPlacementsResponse:
        """Return what could be placed, by ring size."""
        return await self._placement.unary(
            self._placement_stub.PreviewPlacements, request, timeout=HUB_SECONDS
        )

    async def model(self, model_id: str, revision: str) -> downloads_pb2.Model:
        """Return what a model's files say about it."""
        request = downloads_service_pb2.GetModelRequest(model_id=model_id, revision=revision)
        response = await self._downloads.unary(
            self._downloads_stub.GetModel, request, timeout=HUB_SECONDS
        )
        return response.model

    async def models(self) -> downloads_service_pb2.ListModelsResponse:
        """Return every model that is on any node's disk, and the room on each disk."""
        found = downloads_service_pb2.ListModelsResponse()
        request = downloads_service_pb2.ListModelsRequest(page_size=_PAGE_SIZE)
        while True:
            response = await self._downloads.unary(
                self._downloads_stub.ListModels, request, timeout=QUICK_SECONDS
            )
            found.models.extend(response.models)
            request.page_token = response.next_page_token
            if not request.page_token:
                found.disks.extend(response.disks)
                return found

    async def verify_model(
        self, node_id: str, model_id: str
    ) -> AsyncGenerator[downloads_service_pb2.Verification, None]:
        """Compare a model's files on a node's disk with their hashes; yield how far that is.

        Closing the generator stops it.
        """
        request = downloads_service_pb2.VerifyModelRequest(node_id=node_id, model_id=model_id)
        stream = self._downloads.stream(self._downloads_stub.VerifyModel, request)
        async with aclosing(stream):
            async for response in stream:
                yield response.verification

    async def delete_model(self, node_id: str, model_id: str) -> int:
        """Remove a model from a node's disk; return the bytes freed."""
        request = downloads_service_pb2.DeleteModelRequest(node_id=node_id, model_id=model_id)
        response = await self._downloads.unary(
            self._downloads_stub.DeleteModel, request, timeout=HUB_SECONDS
        )
        return response.freed_bytes

    async def list_downloads(self, model_id: str) -> list[downloads_pb2.Download]:
        """Return all downloads of a model, newest first."""
        downloads: list[downloads_pb2.Download] = []
        request = downloads_service_pb2.ListDownloadsRequest(
            model_id=model_id, page_size=_PAGE_SIZE
        )
        while True:
            response = await self._downloads.unary(
                self._downloads_stub.ListDownloads, request, timeout=QUICK_SECONDS
            )
            downloads += response.downloads
            request.page_token = response.next_page_token
            if not request.page_token:
                return downloads

    async def start_download(
        self, node_id: str, model_id: str, revision: str
    ) -> downloads_pb2.Download:
        """Have a node fetch a whole model; return the download, new or joined."""
        request = downloads_service_pb2.StartDownloadRequest(
            node_id=node_id, model_id=model_id, revision=revision
        )
        response = await self._downloads.unary(
            self._downloads_stub.StartDownload, request, timeout=HUB_SECONDS
        )
        return response.download

    async def cancel_download(self, download_id: str) -> None:
        """Stop a download; what it fetched stays."""
        request = downloads_service_pb2.CancelDownloadRequest(download_id=download_id)
        await self._downloads.unary(
            self._downloads_stub.CancelDownload, request, timeout=QUICK_SECONDS
        )

    async def watch_downloads(
        self, download_ids: Sequence[str]
    ) -> AsyncGenerator[Sequence[downloads_pb2.Download], None]:
        """Yield these downloads as they are, then those that changed, for as long as wanted."""
        request = downloads_service_pb2.WatchDownloadsRequest(download_ids=download_ids)
        stream = self._downloads.stream(self._downloads_stub.WatchDownloads, request)
        async with aclosing(stream):
            async for response in stream:
                yield response.downloads

    def runner(
        self, node_id: str, label: str, endpoints: Sequence[common_pb2.Endpoint]
    ) -> RunnerClient:
        """Return the client of a node's runner; `label` names the node in error messages."""
        if node_id not in self._runners:
            self._runners[node_id] = RunnerClient(
                node_id,
                label,
                [HostPort(endpoint.address, endpoint.port) for endpoint in endpoints],
            )
        return self._runners[node_id]

    def head(self, placement: placement_pb2.Placement) -> RunnerClient:
        """Return the client of the runner on rank 0."""
        rank = placement.ranks[0]
        return self.runner(rank.node_id, rank.node_name, rank.endpoints)


def _address(text: str, host: str, port: int) -> HostPort:
    return parse_host_port(text, default_port=port) if text else HostPort(host, port)


def _host(text: str) -> str:
    """Return a host without brackets; a port has no place here, for there are three services."""
    host = text.strip().removeprefix("[").removesuffix("]")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            host = ""
    if not host:
        raise invalid_field("cluster", text, "a host name or address, without a port")
    return host
