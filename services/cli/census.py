"""Which instances there are, asked of every node."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.cli.client import Cluster
from services.cli.names import names_of_nodes
from services.common.errors import Reason, ShardringError
from shardring.runner.v1 import runner_pb2
from shardring.topology.v1 import topology_pb2


@dataclass(frozen=True)
class Census:
    """What the nodes told.

    `instances`: newest first. `holders`: instance id -> nodes that know it. `unreachable`: label
    of a node that didn't answer -> why; `unreachable_ids`: the ids of these nodes. `node_ids`:
    all that were asked; `gathering`: topology has just started, and may not know of others yet.
    """

    instances: list[runner_pb2.Instance]
    holders: dict[str, list[topology_pb2.Node]]
    unreachable: dict[str, ShardringError]
    unreachable_ids: frozenset[str] = frozenset()
    node_ids: frozenset[str] = frozenset()
    gathering: bool = False

    def find(self, instance_id: str) -> runner_pb2.Instance:
        """Return an instance. Raises INSTANCE_NOT_FOUND saying what there is."""
        for instance in self.instances:
            if instance.instance_id == instance_id:
                return instance
        live = [i.instance_id for i in self.instances if not ended(i)]
        known = f"Running: {', '.join(live)}." if live else "None is running."
        if self.unreachable:
            known += f" Not asked, because unreachable: {', '.join(self.unreachable)}."
        raise ShardringError(
            Reason.INSTANCE_NOT_FOUND,
            f"No node knows an instance {instance_id!r}. {known}",
            metadata={"instance_id": instance_id},
        )


async def take_census(cluster: Cluster) -> Census:
    """Ask all nodes at once. Raises only when topology cannot be asked which nodes there are."""
    topology = await cluster.topology()
    nodes = topology.nodes
    names = names_of_nodes(nodes)

    async def ask(node: topology_pb2.Node) -> list[runner_pb2.Instance] | ShardringError:
        label = names.label(node.node_id)
        try:
            return await cluster.runner(node.node_id, label, node.endpoints).list()
        except ShardringError as error:
            return error

    answers = dict(
        zip((n.node_id for n in nodes), await asyncio.gather(*map(ask, nodes)), strict=True)
    )
    views: list[list[runner_pb2.Instance]] = []
    holders: dict[str, list[topology_pb2.Node]] = {}
    unreachable: dict[str, ShardringError] = {}
    for node in nodes:
        answer = answers[node.node_id]
        if isinstance(answer, ShardringError):
            unreachable[names.label(node.node_id)] = answer
            continue
        views.append(answer)
        for instance in answer:
            holders.setdefault(instance.instance_id, []).append(node)
    silent = frozenset(i for i, answer in answers.items() if isinstance(answer, ShardringError))
    return Census(
        merge_views(views), holders, unreachable, silent, frozenset(answers), topology.gathering
    )


def merge_views(views: Iterable[Sequence[runner_pb2.Instance]]) -> list[runner_pb2.Instance]:
    """Return each instance once, newest first: as its head sees it, else the lowest rank.

    Of two placements under one id, as after a restart on other nodes, the newer counts.
    """
    by_placement: dict[tuple[str, bytes], runner_pb2.Instance] = {}
    for view in views:
        for instance in view:
            key = (
                instance.instance_id,
                instance.placement.SerializeToString(deterministic=True),
            )
            held = by_placement.get(key)
            if held is None or instance.rank < held.rank:
                by_placement[key] = instance
    by_id: dict[str, runner_pb2.Instance] = {}
    for instance in by_placement.values():
        held = by_id.get(instance.instance_id)
        if held is None or _created(instance) > _created(held):
            by_id[instance.instance_id] = instance
    return sorted(by_id.values(), key=lambda i: (-_created(i), i.instance_id))


def ended(instance: runner_pb2.Instance) -> bool:
    """Return whether an instance is over."""
    return instance.state in (
        runner_pb2.INSTANCE_STATE_STOPPED,
        runner_pb2.INSTANCE_STATE_FAILED,
    )


def _created(instance: runner_pb2.Instance) -> int:
    return instance.create_time.ToNanoseconds()
