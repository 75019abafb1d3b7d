"""A process that measures as a node does: `python -m tests.fakes.measuring`.

Prints which parts of the OpenTelemetry SDK it came to import.
"""

import sys

from services.common.addresses import HostPort
from services.common.metrics import start_metrics
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState
from services.runner.metrics import Metrics, observe_instances
from services.runner.views import InstanceLoad, InstanceView, ShardUsage, ShardView


def view(instance_id: str, rank: int, state: ShardState) -> InstanceView:
    """Return an instance of two ranks, all in one state, as `rank` sees it."""
    hosts, endpoints = ("h:1", "h:2"), (HostPort("10.0.0.1", 1),)
    ring = Ring(
        "org/m",
        "c0ffee",
        8,
        tuple(Rank(r, f"id-{r}", f"n{r}", endpoints, (4 * r, 4 * r + 4), hosts, 1) for r in (0, 1)),
    )
    usage = ShardUsage(0.5, 1000, 4000, 300) if state is ShardState.READY else None
    memory = 9000 if state is ShardState.READY else 0
    shards = tuple(ShardView(r, state, 1.0, memory_bytes=memory, usage=usage) for r in (0, 1))
    at_work = rank == 0 and state is ShardState.READY
    load = InstanceLoad(3, 1, 812.0, 52.5, 2.5) if at_work else None
    return InstanceView(instance_id, ring, rank, shards, 1.0, load=load)


def main() -> None:
    """Record a few requests, and end."""
    if start_metrics("shardring-node", node_id="id-0", node_name="n0") is not None:
        ready, failed = ShardState.READY, ShardState.FAILED
        views = [view("chat", 0, ready), view("far", 1, ready), view("broken", 0, failed)]
        observe_instances(lambda: views)
    metrics = Metrics("org/m", "chat")
    for is_chat in (True, False):
        metrics.request_ended(
            finish_reason="stop",
            is_chat=is_chat,
            prompt_tokens=20,
            cached_tokens=8,
            completion_tokens=5,
            queue_s=0.25,
            time_to_first_token_s=0.5,
            decode_s=2.0,
        )
    # One that failed on its way, and one whose client went away before its second token.
    metrics.request_ended(error_type="INSTANCE_FAILED", duration_s=0.25)
    metrics.request_ended(
        finish_reason="cancelled",
        prompt_tokens=20,
        completion_tokens=1,
        queue_s=0.25,
        time_to_first_token_s=0.5,
    )
    print([name for name in sys.modules if name.startswith("opentelemetry.sdk.metrics")])


if __name__ == "__main__":
    main()
