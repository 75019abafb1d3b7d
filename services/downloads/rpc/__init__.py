"""DownloadsService on the wire."""

from services.common.server import Registration
from services.downloads.rpc.servicer import DownloadsServicer
from shardring.downloads.v1 import downloads_service_pb2
from shardring.downloads.v1.downloads_service_pb2_grpc import add_DownloadsServiceServicer_to_server

FULL_NAME = downloads_service_pb2.DESCRIPTOR.services_by_name["DownloadsService"].full_name


def registration(servicer: DownloadsServicer) -> Registration:
    """Return what `start_server` needs to serve DownloadsService."""
    return Registration(
        FULL_NAME, lambda server: add_DownloadsServiceServicer_to_server(servicer, server)
    )
