"""Run a file of placement cases through real topology, downloads and placement processes.

    python -m tests.conformance.placement FILE

Prints a line for each case that differs, and a count; exits with 1 when any does.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.addresses import HostPort
from services.common.channel import Remote
from services.common.errors import Reason, ShardringError
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2
from shardring.downloads.v1.downloads_service_pb2_grpc import DownloadsServiceStub
from shardring.placement.v1 import placement_pb2
from shardring.placement.v1.placement_service_pb2_grpc import PlacementServiceStub
from shardring.topology.v1 import topology_pb2
from tests.conformance.placement_case import Case
from tests.contract.topology_lab import Client, started

COMMIT = "c" * 40
NODE_PORT = 52420
_CALL_SECONDS = 30.0
# Knows the models' facts; not a node of any case, and so of no topology.
_LIBRARIAN = "librarian"
_STATES = {
    "completed": downloads_pb2.DOWNLOAD_STATE_COMPLETED,
    "ongoing": downloads_pb2.DOWNLOAD_STATE_ONGOING,
    "pending": downloads_pb2.DOWNLOAD_STATE_PENDING,
    "failed": downloads_pb2.DOWNLOAD_STATE_FAILED,
}


class Services:
    """The three services, and what is told to the first two."""

    def __init__(self, topology: HostPort, downloads: HostPort, placement: HostPort) -> None:
        self.topology = Client(topology)
        self._downloads = Remote("downloads", [downloads])
        self._placement = Remote("placement", [placement])
        self._workers = DownloadsServiceStub(self._downloads.channel)
        self._placer = PlacementServiceStub(self._placement.channel)

    async def close(self) -> None:
        """End the connections."""
        for remote in (self.topology.remote, self._downloads, self._placement):
            await remote.close()

    async def outcome(self, case: Case) -> placement_pb2.Placement | Reason:
        """Make the cluster of a case, ask, and take the cluster away again."""
        async with AsyncExitStack() as stack:
            hello = downloads_service_pb2.WorkerHello(
                node_id=_LIBRARIAN, cached_models=[cached_model(case, 0, model=model_of(case))]
            )
            await stack.enter_async_context(self._attached(hello))
            for node_id, record in case.raw["downloads"].items():
                worker = self._attached(hello_of(case, node_id, record))
                await stack.enter_async_context(worker)
            for node in case.raw["nodes"]:
                await self.topology.report_node(node_of(case, node))
                stack.push_async_callback(self.topology.remove, node["id"])
            for node in case.raw["nodes"]:
                await self.topology.report_links(node["id"], *links_of(case, node["id"]))
            call = self._placement.unary(self._placer.Place, case.request(), timeout=_CALL_SECONDS)
            try:
                return (await call).placement
            except ShardringError as refusal:
                return refusal.reason

    @asynccontextmanager
    async def _attached(self, hello: downloads_service_pb2.WorkerHello) -> AsyncIterator[None]:
        done = asyncio.Event()

        async def requests() -> AsyncIterator[downloads_service_pb2.AttachWorkerRequest]:
            yield downloads_service_pb2.AttachWorkerRequest(hello=hello)
            await done.wait()

        call = self._workers.AttachWorker(requests())
        answers = aiter(call)
        try:
            assert (await anext(answers)).HasField("welcome")
            yield
        finally:
            done.set()
            async for _ in answers:
                pass


def node_of(case: Case, node: Mapping[str, Any]) -> topology_pb2.Node:
    """Return the report of a case's node."""
    memory = case.memory_bytes(dict(node))
    message = topology_pb2.Node(
        node_id=node["id"],
        name=node["id"],
        memory_total_bytes=memory,
        memory_available_bytes=memory,
        backends=[common_pb2.BACKEND_METAL],
        endpoints=[
            common_pb2.Endpoint(address=interface["ip_address"], port=NODE_PORT)
            for interface in node["interfaces"]
        ],
        interfaces=[
            topology_pb2.NetworkInterface(
                name=interface["name"],
                kind=kind_of(interface["kind"]),
                addresses=[interface["ip_address"]],
            )
            for interface in node["interfaces"]
        ],
    )
    message.start_time.FromNanoseconds(time.time_ns())
    return message


def links_of(case: Case, source: str) -> list[topology_pb2.Link]:
    """Return the links that a case's node reports, none of them measured."""
    kinds = {
        (node["id"], interface["ip_address"]): interface["kind"]
        for node in case.raw["nodes"]
        for interface in node["interfaces"]
    }
    return [
        topology_pb2.Link(
            source_node_id=source,
            sink_node_id=link["sink"],
            sink_address=link["sink_ip"],
            sink_port=NODE_PORT,
            kind=kind_of(kinds.get((link["sink"], link["sink_ip"]), "unknown")),
        )
        for link in case.raw["links"]
        if link["source"] == source
    ]


def kind_of(name: str) -> topology_pb2.InterfaceKind.ValueType:
    """Return a kind of interface by its name in a case."""
    return topology_pb2.InterfaceKind.Value(f"INTERFACE_KIND_{name.upper()}")


def model_of(case: Case) -> downloads_pb2.Model:
    """Return a case's model as a node would report it."""
    model, layers = case.raw["model"], [case.layer_bytes] * case.layer_count
    return downloads_pb2.Model(
        model_id=model["model_id"],
        commit=COMMIT,
        model_type="llama",
        engine_supported=True,
        layer_count=len(layers),
        layer_bytes=layers,
        weight_bytes=sum(layers),
        hidden_size=model["hidden_size"],
        key_value_head_count=model["num_key_value_heads"],
        tensor_supported=model["supports_tensor"],
        files=[downloads_pb2.ModelFile(name="model.safetensors", size_bytes=sum(layers))],
    )


def cached_model(
    case: Case,
    downloaded_bytes: int,
    total_bytes: int = 0,
    model: downloads_pb2.Model | None = None,
) -> downloads_service_pb2.CachedModel:
    """Return how a case's model lies on a disk."""
    return downloads_service_pb2.CachedModel(
        model_id=case.raw["model"]["model_id"],
        commit=COMMIT,
        revisions=["main"],
        downloaded_bytes=downloaded_bytes,
        total_bytes=total_bytes,
        model=model,
    )


def hello_of(
    case: Case, node_id: str, record: Mapping[str, Any]
) -> downloads_service_pb2.WorkerHello:
    """Return what a node's worker says that has this download."""
    done, total = record.get("downloaded_bytes", 0), record.get("total_bytes", 0)
    if record["state"] == "completed":
        # Worked cases leave the amounts out: all of it, whatever that is.
        done = total = total or 1
    elif total and done >= total:
        total = done + 1
    download = downloads_pb2.Download(
        download_id=f"{node_id}-{case.name}",
        node_id=node_id,
        model_id=case.raw["model"]["model_id"],
        revision="main",
        commit=COMMIT,
        state=_STATES[record["state"]],
        downloaded_bytes=min(done, total),
        total_bytes=total,
    )
    now = time.time_ns()
    download.create_time.FromNanoseconds(now)
    download.update_time.FromNanoseconds(now)
    if record["state"] == "failed":
        download.error.reason, download.error.code = Reason.DOWNLOAD_FAILED, 14
    return downloads_service_pb2.WorkerHello(
        node_id=node_id,
        cached_models=[cached_model(case, min(done, total), total)],
        downloads=[download],
    )


async def run(cases: list[Case]) -> int:
    """Run cases; print the differing ones and a count, and return how many differ."""
    async with AsyncExitStack() as stack:
        quiet = ("--listen", "127.0.0.1:0", "--log-level", "error")
        beats = ("--heartbeat-seconds", "1")
        topology = await stack.enter_async_context(started("services.topology", *quiet, *beats))
        downloads = await stack.enter_async_context(started("services.downloads", *quiet))
        where = ("--topology", str(topology[1]), "--downloads", str(downloads[1]))
        placement = await stack.enter_async_context(started("services.placement", *quiet, *where))
        services = Services(topology[1], downloads[1], placement[1])
        stack.push_async_callback(services.close)
        async with asyncio.timeout(30):
            # Until then a refusal might be for want of reports.
            while (await services.topology.get()).topology.gathering:
                await asyncio.sleep(0.1)
        differing = 0
        for case in cases:
            differences = case.differences(await services.outcome(case))
            if differences:
                differing += 1
                print(f"case {case.name}: {'; '.join(differences)}", flush=True)
    print(f"{len(cases) - differing} of {len(cases)} cases as expected, {differing} differ")
    return differing


def main() -> None:
    """Run the file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m tests.conformance.placement FILE")
    cases = [Case(raw) for raw in json.loads(Path(sys.argv[1]).read_text())]
    sys.exit(1 if asyncio.run(run(cases)) else 0)


if __name__ == "__main__":
    main()
