import pytest

from services.downloads.domain.records import FileProgress
from services.downloads.worker.meter import Meter, Speed
from services.downloads.worker.protocol import Fault, Outcome

ETAGS = {"x": "ex", "y": "ey"}


def meter() -> Meter:
    return Meter(ETAGS, [FileProgress("x", 0, 100), FileProgress("y", 40, 200)])


def test_speed_is_of_the_last_seconds_and_never_negative() -> None:
    speed = Speed()
    assert speed.add(0, 0) == 0
    assert speed.add(1, 100) == 100
    assert speed.add(2, 300) == 150
    assert speed.add(6.5, 300) == round(0 / 4.5)
    assert speed.add(7, 0) == 0


def test_what_is_under_way_is_seen_on_disk_and_by_its_source() -> None:
    going = meter()
    assert going.etags == set()
    going.begin("x", "")
    going.begin("y", "n-1")
    assert going.etags == {"ex", "ey"}
    going.look(0, {"ey": 40})
    seen = going.look(1, {"ex": 20, "ey": 100})
    x, y = seen["files"]
    assert (x.downloaded_bytes, x.bytes_per_second, x.source_node_id) == (20, 20, "")
    assert (y.downloaded_bytes, y.bytes_per_second, y.source_node_id) == (100, 60, "n-1")
    assert (x.time_left_seconds, y.time_left_seconds) == (4.0, pytest.approx(100 / 60))
    assert (seen["downloaded_bytes"], seen["total_bytes"]) == (120, 300)
    assert (seen["bytes_per_second"], seen["time_left_seconds"]) == (80, 180 / 80)
    assert (seen["received_from_hub_bytes"], seen["received_from_nodes_bytes"]) == (20, 60)
    assert going.left_bytes == 180


def test_a_blob_is_whole_only_once_its_fetching_has_ended() -> None:
    going = meter()
    going.begin("x", "")
    seen = going.look(0, {"ex": 100})
    assert seen["files"][0].downloaded_bytes == 99
    going.end(Outcome("x", received_bytes=100, kept_bytes=100))
    seen = going.look(1, {})
    assert seen["files"][0] == FileProgress("x", 100, 100)
    assert seen["received_from_hub_bytes"] == 100


def test_what_is_thrown_away_counts_as_received_only() -> None:
    going = meter()
    going.begin("x", "n-1")
    going.look(0, {"ex": 90})
    going.end(Outcome("x", "n-1", received_bytes=100, fault=Fault.LIED))
    seen = going.look(1, {})
    assert seen["files"][0].downloaded_bytes == 0
    assert (seen["bytes_per_second"], seen["time_left_seconds"]) == (0, None)
    going.begin("x", "")
    going.end(Outcome("x", received_bytes=100, kept_bytes=100))
    seen = going.look(2, {})
    assert (seen["received_from_hub_bytes"], seen["received_from_nodes_bytes"]) == (100, 100)
    assert seen["downloaded_bytes"] == 140


def test_the_last_look_is_exact_also_of_what_was_cut_off() -> None:
    going = meter()
    going.begin("y", "")
    going.look(0, {"ey": 50})
    last = (FileProgress("x", 0, 100), FileProgress("y", 70, 200))
    seen = going.finish(last)
    assert seen["files"] == last
    assert (seen["downloaded_bytes"], seen["received_from_hub_bytes"]) == (70, 30)
    assert (seen["bytes_per_second"], seen["time_left_seconds"]) == (0, None)
