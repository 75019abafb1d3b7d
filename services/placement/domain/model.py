"""What a model asks of a node: bytes of any stage, exactly as its own files say."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from services.common.errors import Reason, ShardringError


@dataclass(frozen=True)
class Model:
    """Facts about a model. `check_model` says whether they can be placed."""

    model_id: str
    commit: str
    model_type: str
    engine_supported: bool
    # Weight bytes of each layer, in order.
    layer_bytes: tuple[int, ...]
    # Beside its layers the first stage holds these ...
    embedding_bytes: int
    # ... and the last stage these, with the embedding once more when the head is tied to it.
    head_bytes: int
    # In all; less than the sum of the above when the head is tied to the embedding.
    weight_bytes: int

    @property
    def layer_count(self) -> int:
        """Transformer layers."""
        return len(self.layer_bytes)

    def stage_bytes(self, start: int, end: int) -> int:
        """Return the bytes a node needs to hold layers [start, end).

        The one place that knows what a stage costs: whatever else is to count against a node's
        memory belongs here.
        """
        if start == 0 and end == self.layer_count:
            return self.weight_bytes
        first = self.embedding_bytes if start == 0 else 0
        last = self.head_bytes if end == self.layer_count else 0
        return first + self._bytes_before[end] - self._bytes_before[start] + last

    def most_layers(self, available_bytes: int) -> int:
        """Return an upper bound on the layers that any one stage in `available_bytes` can hold."""
        if available_bytes >= self.weight_bytes:
            return self.layer_count
        total, count = 0, 0
        for layer in self._ascending_layer_bytes:
            total += layer
            if total > available_bytes:
                break
            count += 1
        return count

    @cached_property
    def _bytes_before(self) -> tuple[int, ...]:
        return tuple(accumulate(self.layer_bytes, initial=0))

    @cached_property
    def _ascending_layer_bytes(self) -> tuple[int, ...]:
        return tuple(sorted(self.layer_bytes))


def check_model(model: Model) -> None:
    """Raise ARCHITECTURE_UNSUPPORTED or MODEL_MALFORMED unless the model can be placed."""
    if not model.engine_supported:
        raise ShardringError(
            Reason.ARCHITECTURE_UNSUPPORTED,
            f"{model.model_id} is of type {model.model_type!r}, which the engine does not "
            "implement. Choose a model of another architecture.",
            metadata={"model_id": model.model_id, "model_type": model.model_type},
        )
    fault = _fault(model)
    if fault:
        raise ShardringError(
            Reason.MODEL_MALFORMED,
            f"{model.model_id} cannot be placed: {fault}. Its config.json and safetensors headers "
            "contradict each other or are incomplete; delete the model and download it again.",
            metadata={"model_id": model.model_id, "fault": fault},
        )


def _fault(model: Model) -> str:
    if not model.layer_bytes:
        return "it has no layers"
    if min(model.layer_bytes) <= 0:
        return f"layer {model.layer_bytes.index(min(model.layer_bytes))} has no weights"
    if model.embedding_bytes < 0 or model.head_bytes < 0:
        return "its embedding or head has a negative size"
    if model.weight_bytes < sum(model.layer_bytes):
        return "its layers are larger than the whole model"
    return ""
