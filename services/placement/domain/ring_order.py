"""Among cycles of a known weight, the one with the fastest slowest hop, then the best sum."""

from dataclasses import replace
from itertools import accumulate, combinations
from math import inf

import networkx as nx

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.rings import Ring, RingQuestion, canonical, hop_score
from services.placement.domain.walk import Walk


class OrderWalk(Walk):
    """Finds, among acceptable cycles of a known weight, the best hops, then the smallest ids.

    Paths start at the cycle's smallest node and neighbours are tried in id order, so of equally
    good rings the first found is the one to keep.
    """

    def __init__(self, question: RingQuestion, budget: Budget, known: Ring) -> None:
        self.weight = sum(question.weight[node] for node in known)
        # A good ring to begin with lets bad paths be given up early.
        self.ring = shorter_hops(question, known, budget)
        self.score = hop_score(question.graph, self.ring)
        self.found = False
        super().__init__(replace(question, graph=self._relevant(question)), budget)
        self.hop: dict[tuple[str, str], int] = {}
        for a, b, hop in self.question.graph.edges.data("hop"):
            self.hop[a, b] = self.hop[b, a] = hop
        least = (min(self.hop[n, other] for other in near) for n, near in self.neighbours.items())
        self.least_sums = list(accumulate(sorted(least), initial=0))

    def run(self) -> bool:
        """Walk from every start; return False when the budget ran out."""
        question = self.question
        ids = sorted(question.graph)
        try:
            for i, start in enumerate(ids[: len(ids) - question.size + 1]):
                if question.required and start > min(question.required):
                    break
                self.allowed = set(ids[i:])
                self.heavy = [node for node in self.by_weight if node in self.allowed]
                self.distance = self.distances(start, self.allowed)
                self._extend([start], {start}, self.start_weight(start), 0, 0)
        except OutOfSteps:
            return False
        return True

    def _relevant(self, question: RingQuestion) -> nx.Graph:
        """Return the part of the graph in which a ring as heavy and as fast can lie."""
        weight, required = question.weight, question.required
        free = sorted((weight[n] for n in question.graph if n not in required), reverse=True)
        slots = question.size - len(required)
        others = sum(weight[node] for node in required) + sum(free[: max(0, slots - 1)])
        nodes = [
            node
            for node in question.graph
            if node in required or (slots > 0 and others + weight[node] >= self.weight)
        ]
        part = question.graph.subgraph(nodes)
        fast = [edge for edge in part.edges if part.edges[edge]["hop"] <= self.score[0]]
        return two_core(part.edge_subgraph(fast))

    def _hopeless(self, slowest: int, total: int, hops_left: int) -> bool:
        """Say whether no ring with these hops so far and so many to come can be better."""
        bound = (slowest, total + self.least_sums[hops_left])
        return bound >= self.score if self.found else bound > self.score

    def _extend(
        self, path: list[str], on_path: set[str], weight: int, slowest: int, total: int
    ) -> None:
        question, last = self.question, path[-1]
        left = question.size - len(path)
        if left == 0:
            self._close(path, weight, slowest, total)
            return
        slots = left - len(question.required - on_path)
        top = self.heaviest_left(self.heavy, on_path, slots) if slots >= 0 else None
        if top is None:
            return
        self.budget.spend(len(self.neighbours[last]))
        for node in sorted((self.neighbours[last] & self.allowed) - on_path):
            reach = self.weight_with(node, weight, slots, top)
            if reach is None or reach[1] < self.weight or self.distance.get(node, inf) > left:
                continue
            hop = self.hop[last, node]
            hops = (max(slowest, hop), total + hop)
            if not self._hopeless(*hops, left):
                self._extend([*path, node], on_path | {node}, reach[0], *hops)

    def _close(self, path: list[str], weight: int, slowest: int, total: int) -> None:
        first, last = path[0], path[-1]
        # Each ring in one of its two directions only.
        if first not in self.neighbours[last] or path[1] > last or weight != self.weight:
            return
        self.compared_count += 1
        self.budget.spend(len(path) ** 2)
        hop = self.hop[first, last]
        slowest, total = max(slowest, hop), total + hop
        if not self._hopeless(slowest, total, 0) and self.question.accept(tuple(path)):
            self.ring, self.score, self.found = tuple(path), (slowest, total), True


def two_core(graph: nx.Graph) -> nx.Graph:
    """Return the graph without the nodes that lie on no cycle for want of two neighbours."""
    return nx.k_core(graph, 2)


def shorter_hops(question: RingQuestion, ring: Ring, budget: Budget) -> Ring:
    """Reverse stretches of an acceptable ring while that makes its hops better and steps last."""
    edges, size = question.graph.edges, len(ring)
    score, improved = hop_score(question.graph, ring), True
    while improved and budget.remaining > 0:
        improved = False
        for i, j in combinations(range(1, size), 2):
            before, first, last, after = ring[i - 1], ring[i], ring[j], ring[(j + 1) % size]
            if (before, last) not in edges or (first, after) not in edges:
                continue
            old = (edges[before, first]["hop"], edges[last, after]["hop"])
            new = (edges[before, last]["hop"], edges[first, after]["hop"])
            if max(new) > score[0] or (sum(new) >= sum(old) and max(old) < score[0]):
                continue
            # Looking at a whole ring costs some steps for each of its nodes.
            if budget.remaining <= 8 * size:
                break
            budget.spend(8 * size)
            other = (*ring[:i], *reversed(ring[i : j + 1]), *ring[j + 1 :])
            other_score = hop_score(question.graph, other)
            if other_score < score and question.accept(canonical(other)):
                ring, score, improved = other, other_score, True
    return canonical(ring)
