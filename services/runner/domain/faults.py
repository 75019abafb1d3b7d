"""The runner's refusals and faults, each in one place with its figures and words."""

from services.common.errors import Reason, ShardringError, invalid_field
from services.runner.domain.plan import View, missing_ranks
from services.runner.domain.ring import Rank, Ring
from services.runner.domain.state import ShardState


def bad_instance_id(instance_id: str) -> ShardringError:
    """An instance id outside its alphabet."""
    return invalid_field("instance_id", instance_id, '1 to 64 of a-z, 0-9, "-"')


def instance_not_found(instance_id: str) -> ShardringError:
    """An instance this node has no shard of."""
    return ShardringError(
        Reason.INSTANCE_NOT_FOUND,
        f"This node knows no instance {instance_id!r}.",
        metadata={"instance_id": instance_id},
    )


def instance_exists(instance_id: str) -> ShardringError:
    """An instance id that another placement runs under."""
    return ShardringError(
        Reason.INSTANCE_EXISTS,
        f"Instance {instance_id} runs already, otherwise; stop it or take another id.",
        metadata={"instance_id": instance_id},
    )


def instance_not_ready(
    instance_id: str, state: ShardState, error: ShardringError | None
) -> ShardringError:
    """A request to an instance that cannot take it now; `error` is why it failed, if it did."""
    if state is ShardState.FAILED:
        why = f": {error.message}" if error else "."
        return ShardringError(
            Reason.INSTANCE_FAILED,
            f"Instance {instance_id} failed{why}",
            metadata={"instance_id": instance_id, **(error.metadata if error else {})},
        )
    ended = state >= ShardState.STOPPING
    return ShardringError(
        Reason.INSTANCE_NOT_READY,
        f"Instance {instance_id} {'has stopped' if ended else 'is still starting'} ({state.name}).",
        metadata={"instance_id": instance_id, "state": state.name},
        retry_delay_seconds=None if ended else 2,
    )


def not_head(instance_id: str, ring: Ring) -> ShardringError:
    """A call for the head that reached another rank's node."""
    return ShardringError(
        Reason.NOT_HEAD,
        f"The head of instance {instance_id} is node {ring.head.node_name}; ask there.",
        metadata={"instance_id": instance_id, "head_node_id": ring.head.node_id},
    )


def wrong_node(rank: Rank, node_id: str) -> ShardringError:
    """A rank that was sent to node `node_id` instead of its own."""
    return ShardringError(
        Reason.WRONG_NODE,
        f"Rank {rank.rank} is for node {rank.node_id}, but this is node {node_id}.",
        metadata={"expected_node_id": rank.node_id, "node_id": node_id},
    )


def ring_port_in_use(rank: Rank) -> ShardringError:
    """A rank whose port another process, or another rank, has."""
    return ShardringError(
        Reason.RING_PORT_IN_USE,
        f"Port {rank.ring_port} of node {rank.node_name} is taken; place the instance again "
        "under another request id.",
        metadata={"port": rank.ring_port, "node_id": rank.node_id},
    )


def shard_failed(
    rank: Rank, phase: ShardState, why: str, reason: Reason = Reason.SHARD_FAILED
) -> ShardringError:
    """A rank that cannot go on."""
    return ShardringError(
        reason,
        f"Rank {rank.rank} on node {rank.node_name} failed in {phase.name}: {why}",
        metadata={"rank": rank.rank, "node_id": rank.node_id, "phase": phase.name},
    )


def node_lost(rank: Rank, phase: ShardState, what: str) -> ShardringError:
    """A rank whose node went away; `what` ends the sentence, such as "is stopping"."""
    return ShardringError(
        Reason.NODE_LOST,
        f"Node {rank.node_name} with rank {rank.rank} {what}.",
        metadata={"rank": rank.rank, "node_id": rank.node_id, "phase": phase.name},
    )


def phase_timeout(ring: Ring, view: View, limit_seconds: float) -> ShardringError:
    """A start in which nothing moved for too long, naming the ranks waited for."""
    missing = missing_ranks(view)
    names = ", ".join(f"{rank} on {ring.ranks[rank].node_name}" for rank in missing)
    return ShardringError(
        Reason.PHASE_TIMEOUT,
        f"Nothing moved for {limit_seconds:.0f} s while rank {view.rank} was {view.state.name}; "
        f"waiting for rank {names}.",
        metadata={
            "rank": view.rank,
            "phase": view.state.name,
            "limit_seconds": limit_seconds,
            "missing_ranks": ",".join(map(str, missing)),
        },
    )


def request_stuck(rank: Rank, limit_seconds: float) -> ShardringError:
    """A request on the head that made no progress for too long."""
    return ShardringError(
        Reason.PHASE_TIMEOUT,
        f"A request made no progress for {limit_seconds:.0f} s; some rank of the ring is stuck.",
        metadata={
            "rank": rank.rank,
            "phase": ShardState.READY.name,
            "limit_seconds": limit_seconds,
            "missing_ranks": "",
        },
    )
