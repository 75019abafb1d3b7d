"""How fast a placement should be: the arithmetic, in nanoseconds.

To make one token each stage reads its weights once, and the hidden state hops from stage to stage;
the token itself then hops from the last rank to rank 0. So, with bytes and round trips as measured:

    stage = weight bytes that a token reads / weight bytes per second of the node
    hop = half the round trip + bytes sent / throughput, in the slower direction of the link
    decode latency = sum of all stages and hops
    throughput = 1 / the slowest stage or hop, once several requests keep all of them busy
    prefill = per token, sum over stages of multiply-adds / multiply-adds per second of the node,
        and over hops of the hidden state's bytes / throughput

Left out is what every placement of a model pays alike or what is small beside the weights: keys
and values, sampling, and what starting an operation costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from services.placement.domain.cluster import Cluster, Link
from services.placement.domain.model import Model
from services.placement.domain.shards import stages_of

SECOND = 10**9
# One number of four bytes.
TOKEN_BYTES = 4


@dataclass(frozen=True)
class Part:
    """A rank's stage, or its hop to the next rank, and how long it takes for one token."""

    rank: int
    is_hop: bool
    nanoseconds: int


@dataclass(frozen=True)
class Prediction:
    """How fast a placement should be."""

    decode_nanoseconds: int
    slowest: Part
    # 0.0: not known.
    prefill_tokens_per_second: float

    @property
    def tokens_per_second(self) -> float:
        """What one request gets."""
        return SECOND / self.decode_nanoseconds

    @property
    def throughput_tokens_per_second(self) -> float:
        """What all requests together get while every stage is busy."""
        return SECOND / self.slowest.nanoseconds


@dataclass(frozen=True)
class Pace:
    """How long a model's stages and hops take on a cluster's nodes and links."""

    cluster: Cluster
    model: Model

    def is_calibrated(self, node_id: str) -> bool:
        """Say whether it is known how fast a node is."""
        return self.cluster.nodes[node_id].weight_bytes_per_second > 0

    def is_measured(self, a: str, b: str) -> bool:
        """Say whether the links that a ring would use between two nodes are measured."""
        links = self._between(a, b)
        return len(links) == 2 and all(link.is_measured for link in links)

    def stage(self, node_id: str, start: int, end: int) -> int:
        """Return how long layers [start, end) take on a calibrated node. At least 1."""
        speed = self.cluster.nodes[node_id].weight_bytes_per_second
        return max(1, self.model.read_bytes(start, end) * SECOND // speed)

    def hop(self, a: str, b: str) -> int:
        """Return how long a token's hidden state takes between two nodes. At least 1."""
        return self._hop(a, b, self.cluster.message_bytes)

    def token_hop(self, a: str, b: str) -> int:
        """Return how long a token takes between two nodes. At least 1."""
        return self._hop(a, b, TOKEN_BYTES)

    def predict(self, order: Sequence[str], counts: Sequence[int]) -> Prediction | None:
        """Return how fast nodes in rank order with these layer counts should be.

        None where a node is not calibrated or a link not measured.
        """
        around = list(pairwise((*order, order[0]))) if len(order) > 1 else []
        if not all(map(self.is_calibrated, order)) or not all(
            self.is_measured(a, b) for a, b in around
        ):
            return None
        stages = list(zip(order, stages_of(counts), strict=True))
        parts = [
            Part(rank, False, self.stage(node, start, end))
            for rank, (node, (start, end)) in enumerate(stages)
        ]
        for rank, (a, b) in enumerate(around):
            is_token = rank == len(around) - 1
            parts.append(Part(rank, True, self.token_hop(a, b) if is_token else self.hop(a, b)))
        return Prediction(
            decode_nanoseconds=sum(part.nanoseconds for part in parts),
            slowest=max(parts, key=lambda part: part.nanoseconds),
            prefill_tokens_per_second=self._prefill(order, counts),
        )

    def _prefill(self, order: Sequence[str], counts: Sequence[int]) -> float:
        """Prompt tokens per second; the head does not run for them."""
        if self.model.quantized or not self.model.hidden_bytes_per_value:
            return 0.0
        seconds = 0.0
        for node_id, (start, end) in zip(order, stages_of(counts), strict=True):
            weights = sum(self.model.layer_bytes[start:end]) / self.model.hidden_bytes_per_value
            seconds += weights / self.cluster.nodes[node_id].multiply_adds_per_second
        for a, b in pairwise(order):
            rates = [link.throughput_bytes_per_second or 1 for link in self._between(a, b)]
            seconds += self.cluster.message_bytes / min(rates)
        return 1 / seconds

    def _between(self, a: str, b: str) -> list[Link]:
        best = self.cluster.best_links
        return [best[pair] for pair in ((a, b), (b, a)) if pair in best]

    def _hop(self, a: str, b: str, byte_count: int) -> int:
        key = (a, b, byte_count) if a < b else (b, a, byte_count)
        if key not in self._hops:
            # There and back: half of it is one way.
            times = [link.hop_nanoseconds(byte_count) // 2 for link in self._between(a, b)]
            self._hops[key] = max(1, *times)
        return self._hops[key]

    @cached_property
    def _hops(self) -> dict[tuple[str, str, int], int]:
        """Those asked for so far."""
        return {}
