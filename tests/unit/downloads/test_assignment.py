"""Files come from nodes that have them, and from the hub to one node at a time."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from services.common.errors import Reason, ShardringError
from services.downloads.domain.assignment import (
    MAX_COUNT,
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    SETTLE_SECONDS,
    STALLED_SECONDS,
    Ask,
    Assigned,
    Claims,
    check_ask,
    retry_seconds,
)
from services.downloads.domain.records import CachedModel, Download, DownloadState, FileProgress
from services.downloads.domain.stock import Stock

MODEL, COMMIT, SIZE = "o/n", "c" * 40, 100
NOW = 1000.0


def live(node_id: str, *files: FileProgress, commit: str = COMMIT) -> Download:
    return Download(
        f"d-{node_id}",
        node_id,
        MODEL,
        "main",
        None,
        DownloadState.ONGOING,
        1,
        1,
        commit,
        files=files,
    )


def file(name: str, done: int = 0, speed: int = 0, source: str = "") -> FileProgress:
    return FileProgress(name, done, SIZE, speed, source)


@dataclass(frozen=True)
class Node:
    """What a node has on disk and fetches."""

    node_id: str
    cached: CachedModel | None = None
    live: Download | None = None


def fetching(node_id: str, *files: FileProgress, commit: str = COMMIT) -> Node:
    return Node(node_id, None, live(node_id, *files, commit=commit))


def having(node_id: str, *names: str) -> Node:
    return Node(node_id, CachedModel(MODEL, COMMIT, (), 1, 1000, whole_files=frozenset(names)))


class Cluster:
    """Nodes that all serve their files, and what they ask."""

    def __init__(self, *nodes: Node) -> None:
        self.claims, self.stock = Claims(), Stock()
        self.ports = {"a": 9000, "b": 9001, "c": 9002}
        self.now = NOW
        self._nodes: dict[str, Node] = {}
        self.put(*nodes)

    def put(self, *nodes: Node) -> None:
        for node in nodes:
            self.drop(node.node_id)
            self._nodes[node.node_id] = node
            if node.cached is not None:
                self.stock.put_cached(node.node_id, node.cached)
            if node.live is not None:
                self.stock.put_live(node.live)

    def drop(self, node_id: str) -> None:
        node = self._nodes.pop(node_id, Node(node_id))
        if node.cached is not None:
            self.stock.drop_cached(node_id, node.cached)
        if node.live is not None:
            self.stock.drop_live(node.live)

    def ask(
        self,
        node_id: str,
        *names: str,
        count: int = MAX_COUNT,
        excluded: Iterable[str] = (),
        released: Iterable[str] = (),
    ) -> Assigned:
        asked = Ask(node_id, MODEL, COMMIT, names, count, frozenset(excluded), frozenset(released))
        check_ask(asked)
        return self.claims.assign(asked, self.ports, self.stock, self.now)

    def told(self, node_id: str, *names: str, **options: object) -> dict[str, list[str]]:
        """Return the nodes to take each file from, none for the hub."""
        assigned = self.ask(node_id, *names, **options)  # type: ignore[arg-type]
        return {source.file_name: [n for n, _ in source.nodes] for source in assigned.sources}


def test_a_file_comes_from_every_node_that_has_it_whole() -> None:
    whole = Node("b", CachedModel(MODEL, COMMIT, (), 100, 100))
    cluster = Cluster(fetching("a"), whole, having("c", "x"))
    assigned = cluster.ask("a", "x", "y")
    assert [(s.file_name, s.nodes) for s in assigned.sources] == [
        ("x", (("b", 9001), ("c", 9002))),
        ("y", (("b", 9001),)),
    ]
    assert assigned.retry_seconds is None


def test_a_file_just_fetched_counts_before_the_disk_is_looked_at() -> None:
    cluster = Cluster(fetching("b", file("x", SIZE), file("y", SIZE - 1)))
    assert cluster.told("a", "x", "y") == {"x": ["b"], "y": []}


def test_nobody_is_sent_to_a_node_that_serves_nothing_is_away_or_is_itself() -> None:
    cluster = Cluster(having("a", "x"), having("b", "x"), having("gone", "x"))
    cluster.ports["b"] = 0
    assert cluster.told("a", "x") == {"x": []}


def test_each_file_is_left_to_one_node_at_a_time() -> None:
    cluster = Cluster(fetching("a"), fetching("b"), fetching("c"))
    assert cluster.told("a", "x", "y", "z", count=1) == {"x": []}
    assert cluster.told("b", "x", "y", "z", count=1) == {"y": []}
    assigned = cluster.ask("c", "x", "y", "z")
    assert [s.file_name for s in assigned.sources] == ["z"]
    assert assigned.retry_seconds == MIN_RETRY_SECONDS
    # Who asks again for its own is told the same again.
    assert cluster.told("a", "x") == {"x": []}


def test_as_many_as_asked_for_is_no_reason_to_ask_again() -> None:
    cluster = Cluster(fetching("a"))
    assert cluster.ask("a", "x", "y", count=1).retry_seconds is None
    assert cluster.ask("a", "x", "x", "y").retry_seconds is None
    assert cluster.ask("a").sources == ()


def test_once_the_claimant_has_it_others_take_it_from_there() -> None:
    cluster = Cluster(fetching("a"), fetching("b"))
    cluster.ask("a", "x")
    assert cluster.told("b", "x") == {}
    cluster.put(fetching("a", file("x", SIZE)))
    assert cluster.told("b", "x") == {"x": ["a"]}
    # The node that had it loses it: nobody is waited for.
    cluster.put(fetching("a", file("x", 0)))
    assert cluster.told("b", "x") == {"x": []}


def test_a_released_file_is_free() -> None:
    cluster = Cluster(fetching("a"), fetching("b"))
    cluster.ask("a", "x", "y")
    cluster.ask("b", "z", released=["x", "y"])  # not its to release
    assert cluster.told("b", "x", "y") == {}
    cluster.ask("a", count=0, released=["x"])
    assert cluster.told("b", "x", "y") == {"x": []}


def test_a_detached_claimant_is_not_waited_for() -> None:
    cluster = Cluster(fetching("a"), fetching("b"))
    cluster.ask("a", "x")
    del cluster.ports["a"]
    assert cluster.told("b", "x") == {"x": []}


def test_nor_one_that_serves_nothing() -> None:
    cluster = Cluster(fetching("a"), fetching("b"))
    cluster.ports["a"] = 0
    cluster.ask("a", "x")
    assert cluster.told("b", "x") == {"x": []}


@pytest.mark.parametrize("commit", ["", COMMIT])
def test_a_claim_ends_with_its_download(commit: str) -> None:
    cluster = Cluster(fetching("b"))
    # It asks before the report of its download has come.
    cluster.ask("a", "x")
    assert cluster.told("b", "x") == {}
    cluster.put(fetching("a", commit=commit))
    cluster.now += SETTLE_SECONDS
    assert cluster.told("b", "x") == {}
    cluster.drop("a")
    assert cluster.told("b", "x") == {"x": []}


def test_a_claimant_that_gains_nothing_loses_its_claim() -> None:
    cluster = Cluster(fetching("a", file("x", 5)), fetching("b"))
    cluster.ask("a", "x")
    for done in (10, 20, 30):
        cluster.now += STALLED_SECONDS - 0.1
        cluster.put(fetching("a", file("x", done)))
        assert cluster.told("b", "x") == {}
    cluster.now += STALLED_SECONDS - 0.1
    assert cluster.told("b", "x") == {}
    cluster.now += 0.2
    assert cluster.told("b", "x") == {"x": []}
    assert cluster.told("a", "x") == {}


def test_a_file_that_only_excluded_nodes_have_or_fetch_comes_from_the_hub() -> None:
    cluster = Cluster(having("b", "x"), fetching("a"), fetching("c"))
    cluster.ask("c", "y")
    assert cluster.told("a", "x", "y", excluded=["b", "c"]) == {"x": [], "y": []}
    assert cluster.told("c", "y", excluded=["b"]) == {}


def test_what_a_node_was_fetching_before_the_service_restarted_is_still_its() -> None:
    cluster = Cluster(
        fetching("a", file("x", 5, speed=7), file("y", 5, speed=7, source="b"), file("z", 5))
    )
    assert cluster.told("b", "x", "y", "z") == {"y": [], "z": []}
    cluster.now += STALLED_SECONDS
    assert cluster.told("b", "x") == {"x": []}


def test_claims_of_other_models_and_commits_do_not_count_and_old_ones_are_forgotten() -> None:
    cluster = Cluster(fetching("a"), fetching("b"))
    cluster.ask("a", "x")
    other = Ask("b", MODEL, "d" * 40, ("x",), 1)
    assert cluster.claims.assign(other, cluster.ports, cluster.stock, NOW).sources[0].nodes == ()
    cluster.now += 120
    cluster.ask("b", "unrelated")
    assert cluster.told("b", "x") == {"x": []}


def test_many_downloads_are_asked_for_more_seldom() -> None:
    assert retry_seconds(3) == MIN_RETRY_SECONDS
    assert retry_seconds(256) == pytest.approx(2.56)
    assert retry_seconds(100_000) == MAX_RETRY_SECONDS


GOOD = Ask("a", MODEL, COMMIT, ("x",), 1)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, node_id=""),
        replace(GOOD, node_id="n" * 300),
        replace(GOOD, model_id="../x"),
        replace(GOOD, commit="main"),
        replace(GOOD, commit="C" * 40),
        replace(GOOD, file_names=("../x",)),
        replace(GOOD, file_names=("",)),
        replace(GOOD, file_names=tuple(map(str, range(5000)))),
        replace(GOOD, max_count=0),
        replace(GOOD, max_count=-1),
        replace(GOOD, max_count=MAX_COUNT + 1),
        replace(GOOD, released=frozenset({"/x"})),
        replace(GOOD, excluded=frozenset(map(str, range(20_000)))),
    ],
)
def test_what_makes_no_sense_is_refused(bad: Ask) -> None:
    check_ask(GOOD)
    check_ask(replace(GOOD, file_names=(), max_count=0))
    with pytest.raises(ShardringError) as refusal:
        check_ask(bad)
    assert refusal.value.reason is Reason.INVALID_FIELD
