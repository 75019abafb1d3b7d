"""Sizes upwards: the best ring of the fewest nodes, by leaf, download, memory, hops, ids."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from services.placement.domain.budget import Budget, OutOfSteps
from services.placement.domain.candidates import Candidates
from services.placement.domain.demand import Demand, demand_of, sizes_allowed
from services.placement.domain.heaviest_ring import Heaviest, heaviest_ring
from services.placement.domain.model import Model, Sharding
from services.placement.domain.net import Net, members
from services.placement.domain.ring_order import best_order
from services.placement.domain.rings import Ring, RingQuestion, canonical, cycle_hops

# Steps for all sizes together, about a second's worth; a size takes at most half of what is left,
# so that a hard one leaves time for the next ...
TOTAL_STEPS = 2_000_000
# ... and at least this much, enough to find an ordinary ring of any size.
LEAST_STEPS = 6_000
# Steps for all sizes of a preview together, beside the least for each; all sizes get as many.
PREVIEW_STEPS = 400_000
# Of a size's steps, those for the order of hops, the last rule but one: a mesh has more good orders
# than anyone can wait for.
ORDER_STEPS = 200_000

# Shifts a download score above any sum of memory, so that one integer orders by both.
_MEMORY_BITS = 80


@dataclass(frozen=True)
class Found:
    """The outcome of the search for rings of one size."""

    size: int
    # Best ring, from its smallest node on; None: no ring of this size passes every rule.
    ring: Ring | None
    # True when no ring of this size has a better score; of equally good ones this is then the
    # one with the smallest ids as far as the steps allowed.
    proven: bool
    # Rings looked at to the end.
    compared_count: int


def sizes_to_try(candidates: Candidates, model: Model, min_node_count: int) -> list[int]:
    """Return the ring sizes that the count of nodes and the model allow, ascending."""
    least = max(min_node_count, len(candidates.required), 1)
    return sizes_allowed(model, range(least, len(candidates.node_ids) + 1))


def smallest_ring(
    candidates: Candidates, model: Model, min_node_count: int, budget: Budget
) -> Found:
    """Return the best ring of the smallest size that has one; without a ring when no size has.

    `proven` False: a smaller ring, or a better one of this size, may have been missed.
    """
    search, proven = RingSearch(candidates, model), True
    for size in sizes_to_try(candidates, model, min_node_count):
        found = search.of_size(size, budget)
        # A smaller ring that was not found is not a smaller ring that does not exist.
        proven = proven and found.proven
        if found.ring:
            return replace(found, proven=proven)
    return Found(0, None, proven, 0)


def ring_of_size(candidates: Candidates, model: Model, size: int, budget: Budget) -> Found:
    """Return the best ring of this size among those that can hold the model.

    For several sizes, or without some nodes, `RingSearch` does it in less time.
    """
    return RingSearch(candidates, model).of_size(size, budget)


def roomiest_ring(candidates: Candidates, size: int, budget: Budget) -> Found:
    """Return the ring of this size with the most memory, whether or not a model fits in it."""
    demand = Demand(candidates.node_ids, (), lambda ring: True)
    prepared = _Prepared(candidates, demand, candidates.memory_bytes)
    return _best(prepared, size, budget, parts=2, leaves=0, order_matters=False)


class RingSearch:
    """Searches the rings that can hold one model; keeps what does not depend on the size."""

    def __init__(self, candidates: Candidates, model: Model, parts: int = 2) -> None:
        """A size takes at most one of so many parts of the steps that are left."""
        self._candidates, self._model, self._parts = candidates, model, parts
        self._leaves = candidates.net.mask(candidates.cluster.leaves)
        self._prepared: dict[int, _Prepared] = {}

    def of_size(self, size: int, budget: Budget, without: frozenset[str] = frozenset()) -> Found:
        """Return the best ring of this size that has none of some nodes. Raises Stopped."""
        # Stages of whole layers demand the same of every ring of two and more nodes.
        key = size if self._model.sharding is Sharding.TENSOR else min(size, 2)
        if key not in self._prepared:
            demand = demand_of(self._candidates, self._model, size)
            self._prepared[key] = _Prepared(self._candidates, demand, self._weight())
        prepared = self._prepared[key]
        return _best(
            prepared, size, budget, parts=self._parts, leaves=self._leaves, without=without
        )

    def _weight(self) -> dict[str, int]:
        scores, memory = self._candidates.download_scores, self._candidates.memory_bytes
        return {n: (scores[n] << _MEMORY_BITS) + memory[n] for n in self._candidates.node_ids}


class _Prepared:
    """A demand in numbers, for rings of any size."""

    def __init__(self, candidates: Candidates, demand: Demand, weight: Mapping[str, int]) -> None:
        net = candidates.net
        self.candidates = candidates
        self.nodes, self.required = net.mask(demand.able), net.mask(candidates.required)
        # All that is required can be had.
        self.possible = candidates.required <= set(demand.able)
        self.question = RingQuestion(
            net,
            self.nodes,
            0,
            self.required,
            _by_number(net, weight),
            [(_by_number(net, amount), needed) for amount, needed in demand.needs],
            demand.accept,
        )
        # For each need: what the required nodes have with the best 0, 1, 2, ... others.
        self.most = [list(self._sums(amount)) for amount, _ in self.question.needs]

    def _sums(self, amount: Sequence[int]) -> Iterator[int]:
        held = sum(amount[v] for v in members(self.required))
        free = sorted((amount[v] for v in members(self.nodes & ~self.required)), reverse=True)
        return accumulate(free, initial=held)

    def allows(self, size: int) -> bool:
        """Say whether so many nodes can have in sum what is needed."""
        others = size - self.required.bit_count()
        if not self.possible or not 0 <= others <= (self.nodes & ~self.required).bit_count():
            return False
        needs = zip(self.most, self.question.needs, strict=True)
        return all(most[others] >= needed for most, (_, needed) in needs)


def _best(
    prepared: _Prepared,
    size: int,
    budget: Budget,
    *,
    parts: int,
    leaves: int,
    without: frozenset[str] = frozenset(),
    order_matters: bool = True,
) -> Found:
    if not prepared.allows(size):
        return Found(size, None, True, 0)
    net, required = prepared.question.net, prepared.required
    nodes = prepared.nodes & ~net.mask(without)
    question = replace(prepared.question, size=size, nodes=nodes)
    if required & ~nodes:
        return Found(size, None, True, 0)
    steps = max(LEAST_STEPS, budget.remaining // parts)
    share = budget.part(steps)
    if size <= 2:
        found = (
            _one_node(question, leaves, share) if size == 1 else _two_nodes(question, leaves, share)
        )
    else:
        # From three nodes on no ring holds a leaf: each node has two neighbours at least.
        blocks = prepared.candidates.blocks(nodes)
        large = [block for block in blocks if block.bit_count() >= size and not required & ~block]
        questions = [replace(question, nodes=block) for block in large]
        found = best_ring(questions, share, order_matters=order_matters)
    budget.take_back(share, steps)
    return replace(found, size=size)


def _by_number(net: Net, amount: Mapping[str, int]) -> list[int]:
    return [amount.get(node, 0) for node in net.ids]


def _one_node(question: RingQuestion, leaves: int, budget: Budget) -> Found:
    def key(node: int) -> tuple[bool, int, int]:
        return (not leaves >> node & 1, -question.weight[node], node)

    nodes = [v for v in members(question.nodes) if not question.required & ~(1 << v)]
    ordered = sorted(nodes, key=key)
    return _first_accepted(question, ((node,) for node in ordered), budget)


def _two_nodes(question: RingQuestion, leaves: int, budget: Budget) -> Found:
    """Pairs by class (with a leaf first), weight, hop and ids; those short of a need left out."""
    weight, required, net = question.weight, question.required, question.net
    tight = []
    for amount, needed in question.needs:
        least = sorted(amount[v] for v in members(question.nodes))[:2]
        if sum(least) < needed:
            tight.append((amount, needed))
    best_first: list[tuple[bool, int, int, int, int]] = []
    for a in members(question.nodes):
        later = question.nodes >> (a + 1) << (a + 1)
        missing = required & ~(1 << a)
        if missing:
            later = later & missing if missing.bit_count() == 1 else 0
        a_leaf, own, hops = leaves >> a & 1, weight[a], net.hops[a]
        for b in members(net.near[a] & later):
            if not tight or all(amount[a] + amount[b] >= needed for amount, needed in tight):
                plain = not a_leaf and not leaves >> b & 1
                best_first.append((plain, -own - weight[b], hops[b], a, b))
    return _first_accepted(question, _pairs(best_first), budget)


def _pairs(keys: list[tuple[bool, int, int, int, int]]) -> Iterator[tuple[int, int]]:
    if keys:
        # Most often the first will do.
        yield min(keys)[3:]
        keys.sort()
        yield from (key[3:] for key in keys[1:])


def _first_accepted(
    question: RingQuestion, rings: Iterator[tuple[int, ...]], budget: Budget
) -> Found:
    count = 0
    for ring in rings:
        named = question.net.named(ring)
        count += 1
        if question.accept(named):
            return Found(question.size, named, True, count)
        try:
            budget.spend(10)
        except OutOfSteps:
            return Found(question.size, None, False, count)
    return Found(question.size, None, True, count)


def best_ring(
    questions: Sequence[RingQuestion], budget: Budget, *, order_matters: bool = True
) -> Found:
    """Find the heaviest acceptable cycle that answers any of the questions, which are the same but
    for their nodes; then the best hops, then the smallest ids in order.

    `order_matters` False: any of the heaviest cycles will do. Raises Stopped.
    """
    found: list[tuple[RingQuestion, Heaviest]] = []
    order_steps = min(ORDER_STEPS, budget.remaining // 4) if order_matters else 0
    for i, question in enumerate(questions):
        steps = (budget.remaining - order_steps) // (len(questions) - i)
        part = budget.part(steps)
        found.append((question, heaviest_ring(question, part)))
        budget.take_back(part, steps)
    proven = all(heaviest.proven for _, heaviest in found)
    count = sum(heaviest.compared_count for _, heaviest in found)
    best = max((heaviest.weight for _, heaviest in found), default=-1)
    if best < 0:
        return Found(0, None, proven, count)
    answers: list[tuple[tuple[int, int], tuple[int, ...]]] = []
    heaviest_ones = [pair for pair in found if pair[1].weight == best]
    for question, heaviest in heaviest_ones:
        assert heaviest.cycle is not None
        cycle = canonical(heaviest.cycle)
        if order_matters:
            part = budget.part(order_steps // len(heaviest_ones))
            ordered = best_order(question, heaviest, part)
            budget.take_back(part, order_steps // len(heaviest_ones))
            cycle, count = ordered.cycle, count + ordered.compared_count
            proven = proven and ordered.proven
        answers.append((cycle_hops(question.net.hops, cycle), cycle))
    cycle = min(answers)[1]
    return Found(len(cycle), questions[0].net.named(cycle), proven, count)
