import random

from services.downloads.worker.limits import SharedRate, Slots


class Taker:
    """Wants slots, and notes when it is told that there are some."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.told = 0

    def tell(self) -> None:
        self.told += 1

    def take(self, most: int) -> int:
        return self.slots.take(self.tell, most)


def test_slots_are_given_until_there_are_none() -> None:
    slots = Slots(3)
    one, two = Taker(slots), Taker(slots)
    assert one.take(2) == 2
    assert two.take(5) == 1
    assert one.take(1) == 0
    assert (one.told, two.told) == (0, 0)
    slots.give_back()
    # It waits since it got fewer than it wanted, before the other.
    assert (one.told, two.told) == (0, 1)
    assert two.take(1) == 1
    slots.give_back()
    assert one.told == 1
    assert one.take(1) == 1


def test_who_waits_comes_before_who_has() -> None:
    slots = Slots(2)
    greedy, patient = Taker(slots), Taker(slots)
    assert greedy.take(2) == 2
    assert patient.take(9) == 0
    slots.give_back()
    assert greedy.take(9) == 0
    assert patient.told
    assert patient.take(9) == 1
    slots.give_back()
    assert greedy.take(9) == 1


def test_who_wants_nothing_any_more_is_passed_over() -> None:
    slots = Slots(1)
    first, second, third = Taker(slots), Taker(slots), Taker(slots)
    assert first.take(1) == 1
    assert second.take(1) == third.take(1) == 0
    slots.give_back()
    assert (second.told, third.told) == (1, 0)
    assert second.take(0) == 0
    assert third.told == 1
    assert third.take(1) == 1


def test_no_slot_is_lost_and_nobody_waits_beside_a_free_one() -> None:
    chance = random.Random(7)
    slots = Slots(4)
    takers = [Taker(slots) for _ in range(5)]
    held = dict.fromkeys(range(5), 0)
    for _ in range(3000):
        index = chance.randrange(5)
        if held[index] and chance.random() < 0.5:
            held[index] -= 1
            slots.give_back()
        else:
            held[index] += takers[index].take(chance.randrange(4))
        assert 0 <= sum(held.values()) <= 4
        for one in takers:
            # As its event loop would: come when told.
            if one.told:
                one.told = 0
                held[takers.index(one)] += one.take(1)
    for taker in takers:
        taker.take(0)
    slots.give_back(sum(held.values()))
    assert takers[0].take(9) == 4


def test_a_rate_is_divided_among_those_that_receive() -> None:
    rate = SharedRate(120.0)
    seen: dict[str, list[float]] = {"a": [], "b": []}
    a, b = seen["a"].append, seen["b"].append
    rate.join(a)
    rate.join(b)
    rate.leave(a)
    rate.leave(a)
    assert seen == {"a": [120.0, 60.0], "b": [60.0, 120.0]}


def test_without_a_rate_nobody_is_bounded() -> None:
    rate = SharedRate(0.0)
    seen: list[float] = []
    rate.join(seen.append)
    rate.leave(seen.append)
    assert seen == []
