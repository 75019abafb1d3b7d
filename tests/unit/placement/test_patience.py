"""What placement waits for while other services restart."""

from collections.abc import Mapping

import pytest

from services.common.errors import Reason, ShardringError
from services.placement.app import PlacementApp
from services.placement.domain.candidates import Download
from services.placement.domain.cluster import Cluster, cluster_of
from services.placement.domain.model import Model
from services.placement.domain.request import PlacementRequest


class Restarting:
    """Topology and downloads in one; the first calls to topology fail as told."""

    def __init__(self, *faults: ShardringError) -> None:
        self.faults = list(faults)
        self.calls = 0

    async def cluster(self) -> Cluster:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return cluster_of([], [])

    async def model(self, model_id: str, revision: str) -> Model:
        raise ShardringError(Reason.NO_WORKERS, "None.")

    async def downloads(self, model_id: str, revision: str) -> Mapping[str, Download]:
        return {}


async def refusal(restarting: Restarting, patience_seconds: float) -> Reason:
    app = PlacementApp(restarting, restarting, patience_seconds=patience_seconds)
    try:
        with pytest.raises(ShardringError) as refused:
            nobody: frozenset[str] = frozenset()
            await app.place(PlacementRequest("a/b", "", 1, nobody, nobody, request_id="r"))
        return refused.value.reason
    finally:
        app.close()


GONE = ShardringError(Reason.SERVICE_UNAVAILABLE, "Gone.")
GATHERING = ShardringError(Reason.TOPOLOGY_GATHERING, "Gathering.")


async def test_what_passes_is_waited_for() -> None:
    restarting = Restarting(GONE, GATHERING)
    # Then what is meant is said at once: there is no node.
    assert await refusal(restarting, 60) is Reason.NO_NODES
    assert restarting.calls == 3


async def test_without_patience_nothing_is() -> None:
    restarting = Restarting(GONE)
    assert await refusal(restarting, 0) is Reason.SERVICE_UNAVAILABLE
    assert restarting.calls == 1


async def test_patience_ends() -> None:
    restarting = Restarting(*[GONE] * 1000)
    assert await refusal(restarting, 0.5) is Reason.SERVICE_UNAVAILABLE
    assert restarting.calls > 1
