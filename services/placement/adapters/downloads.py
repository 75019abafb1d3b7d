"""Reads models, and what is on the nodes' disks, from the downloads service."""

from collections.abc import Mapping

from services.common import deadline
from services.common.channel import Remote
from services.placement.domain.candidates import Download, DownloadState
from services.placement.domain.model import Model
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2, downloads_service_pb2_grpc

# A node may have to ask the hub for the model's files first.
MODEL_TIMEOUT_SECONDS = 60.0
FRACTIONS_TIMEOUT_SECONDS = 5.0

_STATES = {
    downloads_pb2.DOWNLOAD_STATE_PENDING: DownloadState.UNFINISHED,
    downloads_pb2.DOWNLOAD_STATE_ONGOING: DownloadState.UNFINISHED,
    # Cancelled on purpose: what was fetched is still of use.
    downloads_pb2.DOWNLOAD_STATE_CANCELLED: DownloadState.UNFINISHED,
    downloads_pb2.DOWNLOAD_STATE_COMPLETED: DownloadState.COMPLETED,
    downloads_pb2.DOWNLOAD_STATE_FAILED: DownloadState.FAILED,
}


class DownloadsClient:
    """Calls DownloadsService over `remote`, which the caller closes."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._stub = downloads_service_pb2_grpc.DownloadsServiceStub(remote.channel)

    async def model(self, model_id: str, revision: str) -> Model:
        """Return what the model's own files say.

        Raises GetModel's errors, SERVICE_UNAVAILABLE or SERVICE_TIMEOUT.
        """
        response = await self._remote.unary(
            self._stub.GetModel,
            downloads_service_pb2.GetModelRequest(model_id=model_id, revision=revision),
            timeout=deadline.leaving_time(MODEL_TIMEOUT_SECONDS),
        )
        return model_from_proto(response.model)

    async def downloads(self, model_id: str, revision: str) -> Mapping[str, Download]:
        """Return by node id how much of the model each attached node has.

        Raises SERVICE_UNAVAILABLE or SERVICE_TIMEOUT.
        """
        response = await self._remote.unary(
            self._stub.GetFractions,
            downloads_service_pb2.GetFractionsRequest(model_id=model_id, revision=revision),
            timeout=deadline.leaving_time(FRACTIONS_TIMEOUT_SECONDS),
        )
        return {found.node_id: download_from_proto(found) for found in response.fractions}


def model_from_proto(model: downloads_pb2.Model) -> Model:
    """Return a model's facts; layers whose number contradicts their bytes count as none."""
    agree = model.layer_count == len(model.layer_bytes)
    cuts = None
    if model.HasField("cuts"):
        possible = frozenset(range(1, model.layer_count))
        cuts = possible.intersection(model.cuts.layers)
        cuts = None if cuts == possible else cuts
    return Model(
        model_id=model.model_id,
        commit=model.commit,
        model_type=model.model_type,
        engine_supported=model.engine_supported,
        layer_bytes=tuple(model.layer_bytes) if agree else (),
        embedding_bytes=model.embedding_bytes,
        head_bytes=model.head_bytes,
        weight_bytes=model.weight_bytes,
        hidden_size=max(0, model.hidden_size),
        hidden_bytes_per_value=max(0, model.hidden_bytes_per_value),
        key_value_head_count=max(0, model.key_value_head_count),
        key_value_bytes_per_token=max(0, model.key_value_bytes_per_token),
        tensor_supported=model.tensor_supported,
        quantized=bool(model.quantization),
        cuts=cuts,
        cut_obstacle=model.cuts.obstacle,
    )


def download_from_proto(fraction: downloads_pb2.NodeFraction) -> Download:
    """Return how much of a model a node has."""
    return Download(
        state=_STATES.get(fraction.state, DownloadState.NONE),
        downloaded_bytes=fraction.downloaded_bytes,
        total_bytes=fraction.total_bytes,
    )
