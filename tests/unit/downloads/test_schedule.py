import dataclasses

import pytest

from services.common.errors import Reason
from services.downloads.worker.protocol import Fault, Outcome
from services.downloads.worker.schedule import (
    AWAY_SECONDS,
    LEAST_RETRY_SECONDS,
    MAX_LIES,
    MAX_TOLD_SECONDS,
    NO_SERVICE_SECONDS,
    Assignment,
    Holder,
    Neighbour,
    Schedule,
    best_neighbour,
)
from services.downloads.worker.ways import Way

PATIENCE = 300.0
WAYS = {
    "a": [Way("10.0.0.1", 100), Way("10.0.1.1", 50)],
    "b": [Way("10.0.0.2", 250)],
    "c": [Way("fe80::3", None)],
}


def ways(node_id: str) -> list[Way]:
    return WAYS.get(node_id, [])


def holders(*node_ids: str) -> tuple[Holder, ...]:
    return tuple(Holder(node_id, 9000) for node_id in node_ids)


def schedule(*names: str) -> Schedule:
    return Schedule(names or ("x", "y", "z"), 0.0, PATIENCE)


def failed(name: str, fault: Fault, node_id: str = "", **fields: object) -> Outcome:
    outcome = Outcome(name, node_id, fault=fault, reason="DOWNLOAD_FAILED", message="why")
    return dataclasses.replace(outcome, **fields)  # type: ignore[arg-type]


def from_hub(plan: Schedule, name: str, now: float) -> None:
    """Have the service leave a file to this node, and begin it."""
    assert plan.assigned(Assignment({name: ()}, None), ways, now) == {name: None}
    plan.begin(name, "")


@pytest.mark.parametrize(
    ("nodes", "loads", "excluded", "chosen"),
    [
        ("ab", {}, (), "b"),
        ("ab", {"b": 1}, (), "b"),  # 125 for one more beats 100
        ("ab", {"b": 2}, (), "a"),
        ("ab", {"b": 2, "a": 1}, (), "b"),  # 83 beats 50
        ("ab", {}, ("b",), "a"),
        ("ac", {"a": 9}, (), "a"),  # unmeasured is the slowest
        ("cd", {"c": 3}, (), "c"),  # d is not reached
        ("d", {}, (), None),
        ("", {}, (), None),
    ],
)
def test_the_node_with_most_to_give_is_taken(
    nodes: str, loads: dict[str, int], excluded: tuple[str, ...], chosen: str | None
) -> None:
    found = best_neighbour(holders(*nodes), ways, loads, excluded)
    assert (found.node_id if found else None) == chosen


def test_a_neighbour_is_an_endpoint_of_the_hubs_protocol() -> None:
    best = best_neighbour(holders("c"), ways, {}, ())
    assert best is not None
    assert best.endpoint == "http://[fe80::3]:9000"


def test_files_are_spread_over_nodes() -> None:
    names = [f"f{i}" for i in range(7)]
    plan = schedule(*names)
    chosen = plan.assigned(Assignment(dict.fromkeys(names, holders("a", "b")), None), ways, 0)
    counts = [
        sum(isinstance(node, Neighbour) and node.node_id == n for node in chosen.values())
        for n in "ab"
    ]
    assert counts == [2, 5]  # as 100 to 250


def test_what_is_not_assigned_is_asked_for_again_after_the_delay() -> None:
    plan = schedule()
    assert plan.to_ask(0) == ["x", "y", "z"]
    assert plan.for_hub(0) == []
    chosen = plan.assigned(Assignment({"x": ()}, 2.0), ways, 0)
    assert chosen == {"x": None}
    plan.begin("x", "")
    assert plan.to_ask(1.9) == []
    assert plan.next_time(0) == 2.0
    assert plan.to_ask(2.0) == ["y", "z"]
    # An answer without sources or delay makes nobody ask all the time.
    plan.assigned(Assignment({}, None), ways, 2.0)
    assert plan.to_ask(2.5) == []


def test_without_the_service_everything_comes_from_the_hub_and_it_is_asked_again_later() -> None:
    plan = schedule()
    assert plan.assigned(None, ways, 0) == {}
    assert plan.for_hub(0) == ["x", "y", "z"]
    assert plan.to_ask(0) == []
    assert plan.to_ask(NO_SERVICE_SECONDS) == ["x", "y", "z"]
    assert plan.for_hub(NO_SERVICE_SECONDS) == []
    assert plan.held == set()


def test_nodes_without_a_way_are_reported_as_excluded() -> None:
    plan = schedule("x")
    assert plan.assigned(Assignment({"x": holders("d", "e")}, None), ways, 0) == {}
    assert plan.to_ask(0) == []
    assert plan.to_ask(LEAST_RETRY_SECONDS) == ["x"]
    assert plan.excluded(LEAST_RETRY_SECONDS) == ["d", "e"]
    assert plan.excluded(1e6) == []


def test_a_liar_is_left_out_for_good_and_a_stalled_node_for_a_while() -> None:
    plan = schedule()
    for name, fault, node_id in (("x", Fault.LIED, "a"), ("y", Fault.STALLED, "b")):
        plan.begin(name, node_id)
        assert plan.end(failed(name, fault, node_id), 1.0) is None
    assert plan.is_liar("a")
    assert not plan.is_liar("b")
    assert plan.excluded(1.0) == ["a", "b"]
    assert plan.excluded(1.0 + AWAY_SECONDS) == ["a"]
    assert set(plan.to_ask(1.0)) == {"x", "y", "z"}


def test_a_node_that_is_busy_is_left_out_for_as_long_as_it_says() -> None:
    plan = schedule()
    plan.begin("x", "a")
    plan.end(failed("x", Fault.STALLED, "a", wait_seconds=1.0), 1.0)
    assert plan.excluded(1.9) == ["a"]
    assert plan.excluded(2.0) == []


@pytest.mark.parametrize("fault", list(Fault))
def test_no_fault_of_a_neighbour_ends_a_download(fault: Fault) -> None:
    plan = schedule("x")
    plan.begin("x", "a")
    error = plan.end(failed("x", fault, "a"), 1.0)
    # But this node's own disk is nobody's fault.
    assert (error is not None) == (fault is Fault.LOCAL)
    assert not plan.done


def test_parts_that_do_not_fit_come_from_the_hub() -> None:
    plan = schedule("x")
    plan.begin("x", "a")
    plan.end(failed("x", Fault.MIXED, "a"), 1.0)
    assert plan.for_hub(10.0) == ["x"]
    assert plan.to_ask(10.0) == []
    assert plan.excluded(10.0) == []


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOCAL])
def test_what_waiting_does_not_help_ends_at_once(fault: Fault) -> None:
    plan = schedule("x")
    from_hub(plan, "x", 0)
    error = plan.end(failed("x", fault, reason="MODEL_ACCESS_DENIED"), 0)
    assert error is not None
    assert error.reason is Reason.MODEL_ACCESS_DENIED
    assert plan.held == {"x"}  # to be released


def test_the_hub_may_lie_a_few_times() -> None:
    plan = schedule("x")
    now = 0.0
    from_hub(plan, "x", now)
    for _ in range(MAX_LIES - 1):
        assert plan.end(failed("x", Fault.LIED), now) is None
        assert plan.for_hub(now) == []
        now += 5
        assert plan.for_hub(now) == ["x"]
        plan.begin("x", "")
    assert plan.end(failed("x", Fault.LIED), now) is not None


def test_a_hub_that_stalls_is_asked_less_and_less_and_in_the_end_no_more() -> None:
    plan = schedule("x")
    from_hub(plan, "x", 0)
    waits, now = [], 0.0
    while (error := plan.end(failed("x", Fault.STALLED), now)) is None:
        at = plan.next_time(now)
        assert at is not None
        waits.append(at - now)
        now = at
        assert plan.to_ask(now) == ["x"]
        from_hub(plan, "x", now)
    assert waits[:4] == [1, 2, 4, 8]
    assert max(waits) == 30
    assert PATIENCE < now < PATIENCE + 60
    assert error.reason is Reason.DOWNLOAD_FAILED


def test_bytes_gained_renew_patience_but_not_those_thrown_away() -> None:
    for kept, ends in (([10, 20, 30], False), ([10, 0, 10], True)):
        plan = schedule("x")
        from_hub(plan, "x", 0)
        now, ended = 0.0, []
        for kept_bytes in kept:
            outcome = failed("x", Fault.STALLED, received_bytes=10, kept_bytes=kept_bytes)
            ended.append(plan.end(outcome, now) is not None)
            now += 200
            plan.begin("x", "")
        assert any(ended) == ends, kept


def test_a_stated_wait_holds_for_every_file_and_costs_no_patience() -> None:
    plan = schedule("x", "y")
    for name in ("x", "y"):
        from_hub(plan, name, 0)
    assert plan.end(failed("x", Fault.STALLED, wait_seconds=1000.0), 0) is None
    assert plan.end(failed("y", Fault.STALLED), 0) is None
    # A neighbour may have it meanwhile.
    assert plan.to_ask(1) == ["y"]
    assert plan.assigned(Assignment({"y": ()}, None), ways, 1) == {}
    assert plan.for_hub(999) == []
    assert plan.to_ask(1000) == ["x"]
    assert plan.for_hub(1000) == ["y"]
    from_hub(plan, "x", 1000)
    assert plan.end(failed("x", Fault.STALLED), 1000) is None


def test_a_stated_wait_has_an_end() -> None:
    plan = schedule("x")
    from_hub(plan, "x", 0)
    assert plan.end(failed("x", Fault.STALLED, wait_seconds=MAX_TOLD_SECONDS + 1), 0) is not None


def test_while_the_hub_says_to_wait_neighbours_are_asked_for() -> None:
    plan = schedule("x", "y")
    from_hub(plan, "x", 0)
    plan.end(failed("x", Fault.STALLED, wait_seconds=60.0), 0)
    assert plan.to_ask(0) == ["y"]
    assert plan.next_time(0) == 60.0
    assert plan.assigned(Assignment({"y": ()}, None), ways, 0) == {}
    assert plan.for_hub(59) == []
    assert plan.for_hub(60) == ["y"]
