"""How long placement takes beside listing every cycle, and how that grows.

Both sides run in this process, one after the other, and are measured in processor time of their
thread, so that other work on the machine has little part in it. The search's time includes what it
makes of the graph; that one is given, as it is to the other side.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.placement.domain.budget import Budget
from services.placement.domain.cluster import RingBackend
from services.placement.domain.decide import preview
from services.placement.domain.model import Model, Sharding
from services.placement.domain.net import net_of
from services.placement.domain.request import request_of
from services.placement.domain.search import TOTAL_STEPS, Found, ring_of_size, smallest_ring
from tests.benchmarks import placement_calls
from tests.benchmarks.clusters import (
    KINDS,
    MODEL_ID,
    Case,
    case_of,
    mesh,
    model_for,
    model_of,
    shapes,
)
from tests.benchmarks.enumeration import enumerate_rings
from tests.benchmarks.report import Bar, Figure, Report, table

FASTER = Bar(">=", 1.0)
A_THOUSAND_TIMES = Bar(">=", 1000.0)
CAP = Bar("<", 1.5)
# Mesh size, nodes needed, beside which enumeration, and how many times as fast at least.
BARRED = (
    (9, 2, 9, A_THOUSAND_TIMES),
    (9, 3, 9, A_THOUSAND_TIMES),
    (64, 2, 7, FASTER),
    (64, 21, 7, FASTER),
    (64, 64, 7, FASTER),
    (256, 2, 8, FASTER),
    (256, 85, 8, FASTER),
)
GROWTH = (4, 8, 16, 64, 256)
SPARSE_NODES, SPARSE_SIZES, SPARSE_LAYERS = 128, (42, 127, 128), 130
_ROUNDS = 5


async def measure(folder: Path, hub: Path) -> Report:
    """Measure the search alone, previews, sparse clusters, and calls over gRPC."""
    figures, tables = [], []
    enumerated = {count: _enumeration(count) for count in (7, 8, 9)}
    figures += [Figure(f"placement.enumerate_{n}", s * 1e3, "ms") for n, s in enumerated.items()]
    shown = table(
        "Search in a full mesh, ms (* not proven optimal)",
        "kind",
        *(f"{n}, {k}" for n, k, *_ in BARRED),
    )
    ratios: dict[tuple[int, int, int, Bar], list[float]] = {barred: [] for barred in BARRED}
    for kind in KINDS:
        cells = []
        for barred in BARRED:
            count, needed, beside, _ = barred
            case = mesh(count, kind)
            seconds, found = _search(case, model_for(case, needed))
            assert found.size == needed, (kind, needed, found)
            ratios[barred].append(enumerated[beside] / seconds)
            cells.append(f"{seconds * 1e3:.2f}{'' if found.proven else '*'}")
        shown.add_row(kind.name, *cells)
    tables.append(shown)
    for (count, needed, beside, bar), found_ratios in ratios.items():
        name = f"placement.mesh_{count}.{needed}_needed.beside_{beside}"
        figures.append(Figure(name, min(found_ratios), "times, worst kind", bar))
    growth = table("Growth: search in a full mesh, ms", "kind", *map(str, GROWTH))
    for kind in KINDS:
        for part in ("a third", "all"):
            row = []
            for count in GROWTH:
                case = mesh(count, kind)
                needed = count if part == "all" else max(1, count // 3)
                seconds, found = _search(case, model_for(case, needed))
                row.append(f"{seconds * 1e3:.2f}{'' if found.proven else '*'}")
            growth.add_row(f"{kind.name}, {part}", *row)
    tables.append(growth)
    worst = 0.0
    for kind in KINDS:
        seconds = _median(_previews, partial(mesh, 64, kind))
        worst = max(worst, seconds)
        figures.append(Figure(f"placement.previews_64.{kind.name}", seconds * 1e3, "ms"))
    figures.append(Figure("placement.previews_64.beside_8", enumerated[8] / worst, "times", FASTER))
    sparse = table(
        f"{SPARSE_NODES} nodes, sparse: s, rings of {SPARSE_SIZES} (* not proven optimal)",
        "shape",
        *(kind.name for kind in KINDS),
    )
    slowest = 0.0
    for name, pairs in shapes(SPARSE_NODES):
        cells = []
        for kind in KINDS:
            outcomes = list(_sparse(case_of(SPARSE_NODES, pairs, kind, 1)))
            slowest = max(slowest, *(seconds for seconds, _ in outcomes))
            cells.append(", ".join(text for _, text in outcomes))
        sparse.add_row(name, *cells)
    tables.append(sparse)
    figures.append(Figure("placement.sparse.slowest", slowest, "s", CAP))
    calls = await placement_calls.measure()
    return Report(tables + calls.tables, figures + calls.figures)


def _enumeration(count: int) -> float:
    """Return how long listing and scoring takes; both sides must choose the same ring."""
    for kind in KINDS:
        for needed in (2, count // 3, count):
            case = mesh(count, kind) if count < 9 else mesh(5, kind)
            model = model_for(case, min(needed, len(case.cluster.nodes)))
            found = smallest_ring(case.candidates, model, 1, Budget(TOTAL_STEPS))
            assert found.ring == tuple(enumerate_rings(case, model)[1]), (kind, needed, found)
    case = mesh(count, KINDS[-1])
    model = model_for(case, 2)
    rounds = _ROUNDS if count < 9 else 2
    return _median(lambda fresh: enumerate_rings(fresh, model), lambda: case, rounds)


def _search(case: Case, model: Model) -> tuple[float, Found]:
    found: list[Found] = []
    candidates = case.candidates

    def search(fresh: Case) -> None:
        again = replace(candidates, net=net_of(candidates.graph))
        found.append(smallest_ring(again, model, 1, Budget(TOTAL_STEPS)))

    return _median(search, lambda: case), found[-1]


def _previews(case: Case) -> None:
    request = request_of(model_id=MODEL_ID)
    ways = [(Sharding.PIPELINE, RingBackend.MLX_RING)]
    sizes = preview(case.cluster, model_of(200), case.downloads, request, ways)
    assert len(sizes) == len(case.cluster.nodes), len(sizes)


def _sparse(case: Case) -> Iterator[tuple[float, str]]:
    """Yield for each size how long the search took, and that with what came of it."""
    for size in SPARSE_SIZES:
        began = time.thread_time()
        found = ring_of_size(case.candidates, model_of(SPARSE_LAYERS), size, Budget(TOTAL_STEPS))
        seconds = time.thread_time() - began
        outcome = "" if found.ring else " none"
        yield seconds, f"{seconds:.2f}{outcome}{'' if found.proven else '*'}"


def _median(
    run: Callable[[Case], object], make: Callable[[], Case], rounds: int = _ROUNDS
) -> float:
    """Return the median processor seconds of some runs, each on what is made anew for it."""
    took = []
    for _ in range(rounds):
        case = make()
        began = time.thread_time()
        run(case)
        took.append(time.thread_time() - began)
    return statistics.median(took)
