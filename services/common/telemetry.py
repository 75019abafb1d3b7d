"""OpenTelemetry: one tracer provider a process, exported by OTLP when an endpoint is set."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from grpc.aio import ClientInterceptor, ServerInterceptor
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import aio_client_interceptors, aio_server_interceptor
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

# Calls that run all the time, or for as long as a process: as spans they would be noise.
_QUIET_METHODS = (
    "Check",
    "HealthCheck",
    "Watch",
    "ServerReflectionInfo",
    "ReportNode",
    "ReportLinks",
    "RemoveNode",
    "Identify",
    "MeasureLink",
    "WatchTopology",
    "WatchDownloads",
    "WatchInstance",
    "WatchShard",
    "AttachWorker",
    "AssignSources",
)


def _is_told(call: Any) -> bool:
    """Say whether a call, made or handled, is given a span. Looked at in every call, this takes a
    fortieth of what the package's own filters take for so many names."""
    method = call.method
    name = method.decode() if isinstance(method, bytes) else method
    return name.rpartition("/")[2] not in _QUIET_METHODS


def process_resource(service_name: str, attributes: Mapping[str, str]) -> Resource:
    """Return what describes this process to a collector."""
    return Resource.create(
        {
            "service.name": service_name,
            "service.namespace": "shardring",
            **{f"shardring.{key}": value for key, value in attributes.items()},
        }
    )


def is_exported(signal: str) -> bool:
    """Say whether a signal, TRACES or METRICS, has an OTLP endpoint to go to."""
    wanted = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get(
        f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"
    )
    if wanted:
        # The specification's 10 s would keep a process from ending when its collector is gone.
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    return bool(wanted)


def start_telemetry(service_name: str, **attributes: str) -> TracerProvider:
    """Set this process's tracer provider; call once, before servers and channels are built.

    `attributes` describe the process, such as node_id. Exports by OTLP over gRPC when
    OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set; the other OTEL_*
    variables mean what the OpenTelemetry specification says.
    """
    provider = TracerProvider(resource=process_resource(service_name, attributes))
    if is_exported("TRACES"):
        # Slow to import, and most processes export nothing.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def trace_headers() -> dict[str, str]:
    """Return the W3C headers that carry the current trace to where no gRPC call does."""
    headers: dict[str, str] = {}
    inject(headers)
    return headers


def server_interceptors() -> Sequence[ServerInterceptor]:
    """Return the interceptors that give each handled call a span."""
    return [aio_server_interceptor(filter_=_is_told)]


def client_interceptors() -> Sequence[ClientInterceptor]:
    """Return the interceptors that give each outgoing call a span and carry its context."""
    return list(aio_client_interceptors(filter_=_is_told))
