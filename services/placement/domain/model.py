"""What a model asks of a node: bytes of any stage, exactly as its own files say."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

from services.common.errors import Reason, ShardringError


class Sharding(StrEnum):
    """How a model is cut: into stages of whole layers, or every layer into equal parts."""

    PIPELINE = "PIPELINE"
    TENSOR = "TENSOR"


@dataclass(frozen=True)
class Model:
    """Facts about a model, and how it is to be run. `check_model` says whether it can be placed."""

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
    # 0 where the model does not say.
    hidden_size: int = 0
    hidden_bytes_per_value: int = 0
    key_value_head_count: int = 0
    key_value_bytes_per_token: int = 0
    tensor_supported: bool = False
    quantized: bool = False
    # The layers that a stage may begin at, beside layer 0; None: any, as far as is known.
    cuts: frozenset[int] | None = None
    # What stands against the others, in words.
    cut_obstacle: str = ""
    # How it is to be run: see `run_as`.
    sharding: Sharding = Sharding.PIPELINE
    # Key-value cache of each layer.
    cache_bytes_per_layer: int = 0

    def run_as(self, sharding: Sharding, cache_token_count: int) -> "Model":
        """Return the model cut so, with room in each layer's cache for so many tokens."""
        cache = -(-self.key_value_bytes_per_token * cache_token_count // max(1, self.layer_count))
        return replace(self, sharding=sharding, cache_bytes_per_layer=cache)

    @property
    def needed_bytes(self) -> int:
        """Weights and caches in all."""
        return self.weight_bytes + self.layer_count * self.cache_bytes_per_layer

    @property
    def message_bytes(self) -> int:
        """One token's hidden state on the wire; 0 where the model does not say."""
        return self.hidden_size * self.hidden_bytes_per_value

    def can_be_cut_for(self, node_count: int) -> bool:
        """Say whether there is a part for each of so many nodes, whatever their memory."""
        if node_count == 1:
            return True
        if self.sharding is Sharding.PIPELINE:
            return node_count <= self.most_stages
        # The engine splits heads and hidden state into equal parts.
        sizes = (self.hidden_size, self.key_value_head_count)
        return (
            self.tensor_supported
            and self.hidden_size > 0
            and not any(size % node_count for size in sizes)
        )

    @property
    def most_stages(self) -> int:
        """The number of stages when it is cut wherever it may be."""
        return self.layer_count if self.cuts is None else len(self.cuts) + 1

    def stage_ends(self, first: int, last: int) -> Sequence[int]:
        """Return where a stage may end, of `first` to `last`, ascending."""
        if self.cuts is None:
            return range(first, last + 1)
        ends = self._ends
        return ends[bisect_left(ends, first) : bisect_right(ends, last)]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return (*sorted(self.cuts or ()), self.layer_count)

    def tensor_share_bytes(self, node_count: int) -> int:
        """Return what each of so many nodes holds: a part of every layer and of its cache, and all
        that lies outside of the layers, which the engine does not split."""
        layers = sum(self.layer_bytes)
        outside = max(0, self.weight_bytes - layers)
        return outside + -(-(layers + self.layer_count * self.cache_bytes_per_layer) // node_count)

    @property
    def layer_count(self) -> int:
        """Transformer layers."""
        return len(self.layer_bytes)

    def stage_bytes(self, start: int, end: int) -> int:
        """Return the bytes a node needs to hold layers [start, end).

        The one place that knows what a stage costs: whatever else is to count against a node's
        memory belongs here.
        """
        return self.stage_weight_bytes(start, end) + (end - start) * self.cache_bytes_per_layer

    def stage_weight_bytes(self, start: int, end: int) -> int:
        """Return the weight bytes of layers [start, end) and what belongs to them."""
        if start == 0 and end == self.layer_count:
            return self.weight_bytes
        first = self.embedding_bytes if start == 0 else 0
        last = self.head_bytes if end == self.layer_count else 0
        return first + self._bytes_before[end] - self._bytes_before[start] + last

    def read_bytes(self, start: int, end: int) -> int:
        """Return the weight bytes of layers [start, end) that one token reads.

        The head with the last layer; of the embedding a single row, which counts nothing. All
        experts of a mixture: more than is read, but in the same measure on every node.
        """
        last = self.head_bytes if end == self.layer_count else 0
        return self._bytes_before[end] - self._bytes_before[start] + last

    def most_layers(self, available_bytes: int) -> int:
        """Return an upper bound on the layers that any one stage in `available_bytes` can hold."""
        if available_bytes >= self.needed_bytes:
            return self.layer_count
        return bisect_right(self._bytes_of_smallest, available_bytes)

    @cached_property
    def layers_are_equal(self) -> bool:
        """True when no layer is larger than another."""
        return len(set(self.layer_bytes)) == 1

    @cached_property
    def _bytes_before(self) -> tuple[int, ...]:
        return tuple(accumulate(self.layer_bytes, initial=0))

    @cached_property
    def _bytes_of_smallest(self) -> tuple[int, ...]:
        """What the smallest layer takes, the two smallest, and so on."""
        return tuple(accumulate(n + self.cache_bytes_per_layer for n in sorted(self.layer_bytes)))


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
