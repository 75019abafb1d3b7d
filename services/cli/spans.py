"""A small OTLP trace receiver, and the tree that a trace's spans make."""

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.common.addresses import HostPort


@dataclass(frozen=True)
class Span:
    """One span. Ids are lower-case hexadecimal; times nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    process: str
    start_ns: int
    end_ns: int
    error: bool
    kind: int

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e6


class _NoMetrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes the metrics that nodes send to the same endpoint, and keeps none."""

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Take metrics."""
        return metrics_service_pb2.ExportMetricsServiceResponse()


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that processes export to it by OTLP over gRPC."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.aio.server()
        self.address = HostPort("127.0.0.1", 0)

    async def start(self) -> None:
        """Listen on a free loopback port, which `address` then tells."""
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_NoMetrics(), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = HostPort("127.0.0.1", port)

    async def stop(self) -> None:
        """Stop listening."""
        await self._server.stop(1)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take spans."""
        for resource_spans in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
            process = _process_name(attributes)
            for scope_spans in resource_spans.scope_spans:
                self.spans += [
                    Span(
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        name=span.name,
                        process=process,
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        error=span.status.code == span.status.STATUS_CODE_ERROR,
                        kind=span.kind,
                    )
                    for span in scope_spans.spans
                ]
        return trace_service_pb2.ExportTraceServiceResponse()


def children_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return each span's children by its id, in the order they began.

    A span whose parent is not among them is a root; the roots stand under "".
    """
    known = {span.span_id: span for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(known.values(), key=lambda span: (span.start_ns, span.span_id)):
        parent = span.parent_id if span.parent_id in known else ""
        children.setdefault(parent, []).append(span)
    return children


def _process_name(attributes: dict[str, str]) -> str:
    """Return "topology", "node studio-1", "rank 2": the process that a resource describes."""
    service = attributes.get("service.name", "").removeprefix("shardring-")
    if rank := attributes.get("shardring.rank"):
        return f"rank {rank}"
    if name := attributes.get("shardring.node_name"):
        return f"node {name}"
    return service
