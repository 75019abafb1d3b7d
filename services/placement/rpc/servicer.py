"""PlacementService: convert, call, convert."""

from typing import Any

from grpc.aio import ServicerContext

from services.placement.app import PlacementApp
from services.placement.rpc.conversion import (
    placement_to_proto,
    preview_to_proto,
    request_from_proto,
    ways_from_proto,
)
from shardring.placement.v1 import placement_service_pb2, placement_service_pb2_grpc


class PlacementServicer(placement_service_pb2_grpc.PlacementServiceServicer):
    """Serves `app`."""

    def __init__(self, app: PlacementApp) -> None:
        self._app = app

    async def Place(
        self, request: placement_service_pb2.PlaceRequest, context: ServicerContext[Any, Any]
    ) -> placement_service_pb2.PlaceResponse:
        """Decide."""
        placement = await self._app.place(request_from_proto(request))
        return placement_service_pb2.PlaceResponse(placement=placement_to_proto(placement))

    async def PreviewPlacements(
        self,
        request: placement_service_pb2.PreviewPlacementsRequest,
        context: ServicerContext[Any, Any],
    ) -> placement_service_pb2.PreviewPlacementsResponse:
        """Show for every way and ring size what Place would give."""
        previews = await self._app.preview(request_from_proto(request), ways_from_proto(request))
        return placement_service_pb2.PreviewPlacementsResponse(
            previews=map(preview_to_proto, previews)
        )
