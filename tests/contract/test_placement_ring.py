"""Host lists as placement makes them form MLX rings of real ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.placement.domain.cluster import Backend, Cluster, Link, LinkKind, Node, cluster_of
from services.placement.domain.decide import place
from services.placement.domain.model import Model
from services.placement.domain.request import request_of

SECONDS = 60
# Sums over all ranks, and passes a number once around.
RANK = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
group = mx.distributed.init(strict=True, backend="ring")
rank, size = group.rank(), group.size()
total = mx.distributed.all_sum(mx.array([10.0 ** rank]))
passed = mx.array([1.0])
if rank == 0:
    mx.eval(mx.distributed.send(passed, 1 % size))
    passed = mx.distributed.recv_like(passed, size - 1)
else:
    passed = mx.distributed.recv_like(passed, rank - 1) + 1
    mx.eval(passed)
    mx.eval(mx.distributed.send(passed, (rank + 1) % size))
mx.eval(total, passed)
print(int(total.item()), int(passed.item()), flush=True)
"""


def mesh_of(addresses: Mapping[str, str]) -> Cluster:
    return cluster_of(
        [Node(node_id, node_id, 100, (Backend.CPU,)) for node_id in addresses],
        [
            Link(a, b, addresses[b], LinkKind.ETHERNET)
            for a in addresses
            for b in addresses
            if a != b
        ],
    )


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_ring_forms_and_sums_right(size: int, tmp_path: Path) -> None:
    layers = (1,) * size
    model = Model("org/model", "c", "llama", True, layers, 0, 0, size)
    request_id = f"{os.getpid()}-{size}"
    request = request_of(model_id="org/model", min_node_count=size, request_id=request_id)
    placement = place(
        mesh_of(dict.fromkeys(map(str, range(size)), "127.0.0.1")), model, {}, request
    )
    ranks = []
    for rank in placement.ranks:
        path = tmp_path / f"{rank.rank}.json"
        # What the runner gives MLX: for each rank a list of its addresses.
        path.write_text(json.dumps([[host] for host in rank.hosts]))
        environment = {"MLX_RANK": str(rank.rank), "MLX_HOSTFILE": str(path)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
        )
    try:
        said = [rank.communicate(timeout=SECONDS)[0].split() for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [code.returncode for code in ranks] == [0] * size
    total = str(int("1" * size))
    passed = [size, *range(2, size + 1)]
    assert said == [[total, str(count)] for count in passed]
