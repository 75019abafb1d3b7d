"""Records to and from messages; nothing else touches them."""

from google.protobuf import duration_pb2

from services.common.status import error_from_proto, error_to_proto
from services.common.times import duration_of, seconds, timestamp_of
from services.downloads.domain.assignment import Ask, Assigned
from services.downloads.domain.records import (
    CachedModel,
    Cuts,
    Download,
    DownloadState,
    FileProgress,
    Layers,
    ModelFacts,
    ModelFile,
    ModelOnNodes,
    NodeDisk,
    NodeFraction,
    Verification,
)
from shardring.common.v1 import common_pb2
from shardring.downloads.v1 import downloads_pb2, downloads_service_pb2

_STATES = {
    DownloadState.PENDING: downloads_pb2.DOWNLOAD_STATE_PENDING,
    DownloadState.ONGOING: downloads_pb2.DOWNLOAD_STATE_ONGOING,
    DownloadState.COMPLETED: downloads_pb2.DOWNLOAD_STATE_COMPLETED,
    DownloadState.FAILED: downloads_pb2.DOWNLOAD_STATE_FAILED,
    DownloadState.CANCELLED: downloads_pb2.DOWNLOAD_STATE_CANCELLED,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def layers_to_proto(layers: Layers | None) -> common_pb2.LayerRange | None:
    """Return a layer range as a message; None stays absent."""
    return None if layers is None else common_pb2.LayerRange(start=layers.start, end=layers.end)


def download_to_proto(download: Download) -> downloads_pb2.Download:
    """Return a download as a message."""
    return downloads_pb2.Download(
        download_id=download.download_id,
        node_id=download.node_id,
        model_id=download.model_id,
        revision=download.revision,
        commit=download.commit,
        layers=layers_to_proto(download.layers),
        state=_STATES[download.state],
        downloaded_bytes=download.downloaded_bytes,
        total_bytes=download.total_bytes,
        bytes_per_second=download.bytes_per_second,
        files=[
            downloads_pb2.FileProgress(
                name=file.name,
                downloaded_bytes=file.downloaded_bytes,
                total_bytes=file.total_bytes,
                bytes_per_second=file.bytes_per_second,
                source_node_id=file.source_node_id,
                time_left=_time_left_to_proto(file.time_left_seconds),
            )
            for file in download.files
        ],
        error=None if download.error is None else error_to_proto(download.error),
        snapshot_path=download.snapshot_path,
        create_time=timestamp_of(download.create_time),
        update_time=timestamp_of(download.update_time),
        time_left=_time_left_to_proto(download.time_left_seconds),
        received_from_hub_bytes=download.received_from_hub_bytes,
        received_from_nodes_bytes=download.received_from_nodes_bytes,
    )


def download_from_proto(message: downloads_pb2.Download) -> Download:
    """Return a message as a download, unchecked; an unknown state counts as PENDING."""
    return Download(
        download_id=message.download_id,
        node_id=message.node_id,
        model_id=message.model_id,
        revision=message.revision,
        commit=message.commit,
        layers=layers_from_proto(message.layers) if message.HasField("layers") else None,
        state=_STATES_BACK.get(message.state, DownloadState.PENDING),
        downloaded_bytes=message.downloaded_bytes,
        total_bytes=message.total_bytes,
        bytes_per_second=message.bytes_per_second,
        files=tuple(
            FileProgress(
                file.name,
                file.downloaded_bytes,
                file.total_bytes,
                file.bytes_per_second,
                file.source_node_id,
                _time_left(file),
            )
            for file in message.files
        ),
        error=error_from_proto(message.error) if message.HasField("error") else None,
        snapshot_path=message.snapshot_path,
        create_time=seconds(message.create_time),
        update_time=seconds(message.update_time),
        time_left_seconds=_time_left(message),
        received_from_hub_bytes=message.received_from_hub_bytes,
        received_from_nodes_bytes=message.received_from_nodes_bytes,
    )


def layers_from_proto(message: common_pb2.LayerRange) -> Layers:
    """Return a message as a layer range."""
    return Layers(message.start, message.end)


def facts_to_proto(facts: ModelFacts) -> downloads_pb2.Model:
    """Return a model's facts as a message."""
    return downloads_pb2.Model(
        model_id=facts.model_id,
        commit=facts.commit,
        model_type=facts.model_type,
        engine_supported=facts.engine_supported,
        layer_count=len(facts.layer_bytes),
        layer_bytes=facts.layer_bytes,
        embedding_bytes=facts.embedding_bytes,
        head_bytes=facts.head_bytes,
        weight_bytes=facts.weight_bytes,
        hidden_size=facts.hidden_size,
        attention_head_count=facts.attention_head_count,
        key_value_head_count=facts.key_value_head_count,
        context_token_count=facts.context_token_count,
        has_chat_template=facts.has_chat_template,
        quantization=facts.quantization,
        license=facts.license,
        hidden_bytes_per_value=facts.hidden_bytes_per_value,
        files=[
            downloads_pb2.ModelFile(
                name=file.name,
                size_bytes=file.size_bytes,
                every_stage=file.every_stage,
                first_stage=file.first_stage,
                last_stage=file.last_stage,
                layers=file.layers,
            )
            for file in facts.files
        ],
        key_value_bytes_per_token=facts.key_value_bytes_per_token,
        tensor_supported=facts.tensor_supported,
        gated=facts.gated,
        cuts=None
        if facts.cuts is None
        else downloads_pb2.Cuts(layers=facts.cuts.layers, obstacle=facts.cuts.obstacle),
    )


def facts_from_proto(message: downloads_pb2.Model) -> ModelFacts:
    """Return a message as a model's facts."""
    return ModelFacts(
        model_id=message.model_id,
        commit=message.commit,
        model_type=message.model_type,
        engine_supported=message.engine_supported,
        layer_bytes=tuple(message.layer_bytes),
        embedding_bytes=message.embedding_bytes,
        head_bytes=message.head_bytes,
        weight_bytes=message.weight_bytes,
        hidden_size=message.hidden_size,
        attention_head_count=message.attention_head_count,
        key_value_head_count=message.key_value_head_count,
        context_token_count=message.context_token_count,
        has_chat_template=message.has_chat_template,
        quantization=message.quantization,
        license=message.license,
        hidden_bytes_per_value=message.hidden_bytes_per_value,
        files=tuple(
            ModelFile(
                file.name,
                file.size_bytes,
                file.every_stage,
                file.first_stage,
                file.last_stage,
                tuple(file.layers),
            )
            for file in message.files
        ),
        key_value_bytes_per_token=message.key_value_bytes_per_token,
        tensor_supported=message.tensor_supported,
        gated=message.gated,
        cuts=Cuts(tuple(message.cuts.layers), message.cuts.obstacle)
        if message.HasField("cuts")
        else None,
    )


def cached_to_proto(model: CachedModel) -> downloads_service_pb2.CachedModel:
    """Return a model on disk as a message."""
    return downloads_service_pb2.CachedModel(
        model_id=model.model_id,
        commit=model.commit,
        revisions=model.revisions,
        downloaded_bytes=model.downloaded_bytes,
        total_bytes=model.total_bytes,
        model=None if model.facts is None else facts_to_proto(model.facts),
        whole_files=sorted(model.whole_files),
    )


def cached_from_proto(message: downloads_service_pb2.CachedModel) -> CachedModel:
    """Return a message as a model on disk, unchecked."""
    return CachedModel(
        message.model_id,
        message.commit,
        tuple(message.revisions),
        message.downloaded_bytes,
        message.total_bytes,
        facts_from_proto(message.model) if message.HasField("model") else None,
        frozenset(message.whole_files),
    )


def ask_from_proto(message: downloads_service_pb2.AssignSourcesRequest) -> Ask:
    """Return a message as what a worker asks, unchecked."""
    return Ask(
        message.node_id,
        message.model_id,
        message.commit,
        tuple(message.file_names),
        message.max_count,
        frozenset(message.excluded_node_ids),
        frozenset(message.released_file_names),
    )


def assigned_to_proto(assigned: Assigned) -> downloads_service_pb2.AssignSourcesResponse:
    """Return where to take files from as a message."""
    message = downloads_service_pb2.AssignSourcesResponse(
        sources=[
            downloads_service_pb2.FileSource(
                file_name=source.file_name,
                nodes=[
                    downloads_service_pb2.NodeHub(node_id=node_id, port=port)
                    for node_id, port in source.nodes
                ],
            )
            for source in assigned.sources
        ]
    )
    if assigned.retry_seconds is not None:
        message.retry_delay.FromMilliseconds(round(assigned.retry_seconds * 1000))
    return message


def fraction_to_proto(fraction: NodeFraction) -> downloads_pb2.NodeFraction:
    """Return a node's fraction as a message."""
    return downloads_pb2.NodeFraction(
        node_id=fraction.node_id,
        fraction=fraction.fraction,
        state=(
            downloads_pb2.DOWNLOAD_STATE_UNSPECIFIED
            if fraction.state is None
            else _STATES[fraction.state]
        ),
        downloaded_bytes=fraction.downloaded_bytes,
        total_bytes=fraction.total_bytes,
    )


def disk_to_proto(disk: NodeDisk) -> downloads_service_pb2.NodeDisk:
    """Return the room on a node's disk as a message."""
    return downloads_service_pb2.NodeDisk(
        node_id=disk.node_id, available_bytes=disk.available_bytes
    )


def verification_to_proto(verification: Verification) -> downloads_service_pb2.Verification:
    """Return how far a verification is as a message."""
    return downloads_service_pb2.Verification(
        verified_bytes=verification.verified_bytes,
        total_bytes=verification.total_bytes,
        corrupt_files=verification.corrupt_files,
        unverifiable_files=verification.unverifiable_files,
        done=verification.done,
    )


def verification_from_proto(message: downloads_service_pb2.Verification) -> Verification:
    """Return a message as how far a verification is, unchecked."""
    return Verification(
        message.verified_bytes,
        message.total_bytes,
        tuple(message.corrupt_files),
        tuple(message.unverifiable_files),
        message.done,
    )


def on_nodes_to_proto(model: ModelOnNodes) -> downloads_service_pb2.ModelOnNodes:
    """Return a model and where it is as a message."""
    return downloads_service_pb2.ModelOnNodes(
        model_id=model.model_id,
        fractions=[fraction_to_proto(fraction) for fraction in model.fractions],
        model=None if model.facts is None else facts_to_proto(model.facts),
    )


def _time_left(message: downloads_pb2.Download | downloads_pb2.FileProgress) -> float | None:
    return seconds(message.time_left) if message.HasField("time_left") else None


def _time_left_to_proto(length: float | None) -> duration_pb2.Duration | None:
    return None if length is None else duration_of(length)
