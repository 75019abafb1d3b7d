"""The fastest ring of a few nodes: every set, order and split, by way of sets instead of orders.

After Held and Karp: of all ways to give the nodes of a set, of which one is the last rank so far,
the first layers of a model, only the best is kept. What a bound shows to be no better than what is
known is dropped, and that is most.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.candidates import Candidates
from services.placement.domain.net import members
from services.placement.domain.request import Objective
from services.placement.domain.speed import SECOND
from services.placement.domain.speed_split import Stages

# The set of ranks so far, and the last of them.
_State = tuple[int, int]


@dataclass(frozen=True)
class _Way:
    """Layers up to `end` given to some ranks: what that costs, and how it came about."""

    cost: int
    end: int
    node: int
    before: "_Way | None"


class ExactSearch:
    """Looks for a ring whose figure (latency, or time of the slowest part) is below `best`."""

    def __init__(
        self,
        stages: Stages,
        candidates: Candidates,
        sizes: range,
        objective: Objective,
        budget: Budget,
        best: int | None,
    ) -> None:
        """`candidates`: calibrated nodes, joined where links are measured."""
        self.sizes, self.budget = sizes, budget
        self.in_sum = objective is not Objective.THROUGHPUT
        # More than anything takes.
        self.best = 1 << 100 if best is None else best
        self.order: tuple[str, ...] | None = None
        self.counts: tuple[int, ...] = ()
        self.compared_count = 0
        self.ids = candidates.node_ids
        count = len(self.ids)
        self.required = sum(1 << i for i, n in enumerate(self.ids) if n in candidates.required)
        pace = stages.pace
        model = pace.model
        self.layer_count, self.ends = model.layer_count, model.stage_ends
        self.hops: list[dict[int, int]] = [{} for _ in range(count)]
        self.token_hops: list[dict[int, int]] = [{} for _ in range(count)]
        for i, a in enumerate(self.ids):
            for j, b in enumerate(self.ids):
                if i != j and candidates.graph.has_edge(a, b):
                    self.hops[i][j] = pace.hop(a, b)
                    self.token_hops[i][j] = pace.token_hop(a, b)
        self.speeds = [stages.speed(n) for n in self.ids]
        self.read = stages.read
        rooms = [candidates.rooms[n] for n in self.ids]
        self.least = [room.least_layers for room in rooms]
        self.furthest = [stages.furthest(n) for n in self.ids]
        # Most that one stage on a node can read.
        largest = sorted(model.layer_bytes, reverse=True)
        self.most = [
            min(
                room.memory_bytes,
                model.head_bytes
                + sum(largest[: min(room.most_layers, model.most_layers(room.memory_bytes))]),
            )
            for room in rooms
        ]
        self._rest: dict[int, list[int | None]] = {}

    def run(self) -> bool:
        """Search; return False when the steps ran out before the end."""
        try:
            for first in range(len(self.ids)):
                self._from(first)
        except OutOfSteps:
            return False
        return True

    def _from(self, first: int) -> None:
        if self.required.bit_count() + (not self.required >> first & 1) > self.sizes[-1]:
            return
        tables = {(1 << first, first): self._stage({0: (0, None)}, 1 << first, first)}
        for size in range(1, self.sizes[-1] + 1):
            if size in self.sizes:
                for state, table in tables.items():
                    self._close(first, state, table)
            tables = self._longer(tables) if size < self.sizes[-1] else {}

    def _close(self, first: int, state: _State, table: Mapping[int, _Way]) -> None:
        nodes, last = state
        way = table.get(self.layer_count)
        if way is None or self.required & ~nodes:
            return
        cost = way.cost
        if last != first:
            hop = self.token_hops[last].get(first)
            if hop is None:
                return
            cost = cost + hop if self.in_sum else max(cost, hop)
        self.compared_count += 1
        if cost < self.best:
            self.best = cost
            order, ends = [], []
            step: _Way | None = way
            while step is not None:
                order.append(self.ids[step.node])
                ends.append(step.end)
                step = step.before
            order.reverse()
            ends.reverse()
            self.order = tuple(order)
            starts = [0, *ends[:-1]]
            self.counts = tuple(b - a for a, b in zip(starts, ends, strict=True))

    def _longer(self, tables: Mapping[_State, Mapping[int, _Way]]) -> dict[_State, dict[int, _Way]]:
        """Return the ways with one rank more."""
        joined: dict[_State, dict[int, tuple[int, _Way | None]]] = {}
        for (nodes, last), table in tables.items():
            for node, hop in self.hops[last].items():
                if nodes >> node & 1:
                    continue
                starts = joined.setdefault((nodes | 1 << node, node), {})
                self.budget.spend(1 + len(table))
                for start, way in table.items():
                    if start == self.layer_count:
                        continue
                    cost = way.cost + hop if self.in_sum else max(way.cost, hop)
                    known = starts.get(start)
                    if cost < self.best and (known is None or cost < known[0]):
                        starts[start] = (cost, way)
        longer = {state: self._stage(starts, *state) for state, starts in joined.items() if starts}
        return {state: table for state, table in longer.items() if table}

    def _stage(
        self, starts: Mapping[int, tuple[int, _Way | None]], nodes: int, node: int
    ) -> dict[int, _Way]:
        """Give the last rank its stage, from each layer where the ranks before it may end."""
        found: dict[int, _Way] = {}
        read, speed, rest = self.read, self.speeds[node], self._rest_of(nodes)
        for start, (cost, way) in starts.items():
            furthest = self.furthest[node][start]
            self.budget.spend(1 + max(0, furthest - start))
            for end in self.ends(start + self.least[node], furthest):
                time = max(1, (read[end] - read[start]) * SECOND // speed)
                new = cost + time if self.in_sum else max(cost, time)
                if new >= self.best:
                    break
                more = rest[end]
                if more is None or (new + more if self.in_sum else more) >= self.best:
                    continue
                known = found.get(end)
                if known is None or new < known.cost:
                    found[end] = _Way(new, end, node, way)
        return found

    def _rest_of(self, nodes: int) -> list[int | None]:
        """Return by layer what the layers from there on cost at least on nodes not in a set; None:
        more than they can hold."""
        if nodes in self._rest:
            return self._rest[nodes]
        others = members((1 << len(self.ids)) - 1 & ~nodes)
        pieces = sorted(((self.speeds[v], self.most[v]) for v in others), reverse=True)
        total = sum(speed for speed, _ in pieces)
        bounds: list[int | None] = []
        for end in range(self.layer_count + 1):
            left = self.read[self.layer_count] - self.read[end]
            if left == 0:
                bounds.append(0)
            elif left > sum(most for _, most in pieces):
                bounds.append(None)
            elif self.in_sum:
                time = 0
                for speed, most in pieces:
                    part = min(left, most)
                    left -= part
                    time += part * SECOND // speed
                # Of each stage a fraction of a nanosecond may have been lost.
                bounds.append(max(0, time - len(pieces)))
            else:
                bounds.append(max(0, left * SECOND // total - 1))
        self._rest[nodes] = bounds
        return bounds
