"""OpenTelemetry metrics: one meter provider a process, where an OTLP endpoint is set."""

import os
from typing import TYPE_CHECKING

from opentelemetry import metrics

from services.common.telemetry import is_exported, process_resource

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider


def start_metrics(service_name: str, **attributes: str) -> "MeterProvider | None":
    """Set this process's meter provider; None, and nothing is measured, when nobody would be told.

    Exports by OTLP over gRPC, each minute and once more when the process ends, when
    OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is set and
    OTEL_METRICS_EXPORTER is not "none"; the other OTEL_* variables mean what the OpenTelemetry
    specification says. `attributes` describe the process, as for `start_telemetry`.
    """
    if not is_exported("METRICS") or os.environ.get("OTEL_METRICS_EXPORTER") == "none":
        return None
    # Slow to import, and most processes export nothing.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    provider = MeterProvider(
        metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())],
        resource=process_resource(service_name, attributes),
    )
    metrics.set_meter_provider(provider)
    return provider
