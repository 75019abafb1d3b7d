"""An OTLP collector that keeps the metrics sent to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2

from services.common.addresses import HostPort


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what was exported last of each metric, by its name, and every resource's attributes."""

    def __init__(self) -> None:
        self.metrics: dict[str, metrics_pb2.Metric] = {}
        self.resources: list[dict[str, str]] = []
        self.address = HostPort("127.0.0.1", 0)

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            attributes = resource.resource.attributes
            self.resources.append({a.key: a.value.string_value for a in attributes})
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def metrics_collector() -> AsyncIterator[MetricsCollector]:
    """Run a collector on a free loopback port."""
    collector, server = MetricsCollector(), grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    collector.address = HostPort("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(1)
