"""Who has and fetches what: kept up change by change, and as if counted anew each time."""

import random
from dataclasses import replace

from services.downloads.domain.records import CachedModel, Download, DownloadState, FileProgress
from services.downloads.domain.stock import Stock

COMMITS = ("", "c" * 40, "d" * 40)
NODES, NAMES = ("a", "b", "c"), ("x", "y", "z")


def a_model(rng: random.Random) -> CachedModel:
    whole = frozenset(rng.sample(NAMES, rng.randrange(4)))
    return CachedModel("o/n", rng.choice(COMMITS[1:]), (), rng.choice((1, 10)), 10, None, whole)


def a_download(rng: random.Random, number: int) -> Download:
    files = tuple(FileProgress(name, rng.choice((1, 2)), 2) for name in NAMES)
    state = DownloadState.ONGOING
    node, commit = rng.choice(NODES), rng.choice(COMMITS)
    return Download(f"d-{number}", node, "o/n", "main", None, state, 1, 1, commit, files=files)


def test_holders_are_right_after_any_changes() -> None:
    rng = random.Random(7)
    stock = Stock()
    cached: dict[tuple[str, str], CachedModel] = {}
    live: dict[str, Download] = {}
    for _ in range(3000):
        match rng.randrange(5):
            case 0:
                model, node = a_model(rng), rng.choice(NODES)
                cached[node, model.commit] = model
                stock.put_cached(node, model)
            case 1 if cached:
                key = rng.choice(list(cached))
                stock.drop_cached(key[0], cached.pop(key))
            case 2 if live:
                stock.drop_live(live.pop(rng.choice(list(live))))
            case 3 if live:
                before = live[rng.choice(list(live))]
                after = replace(a_download(rng, 0), download_id=before.download_id)
                if rng.random() < 0.7:
                    after = replace(before, files=after.files)
                live[before.download_id] = after
                stock.replace_live(before, after)
            case _:
                download = a_download(rng, rng.randrange(6))
                if download.download_id not in live:
                    live[download.download_id] = download
                    stock.put_live(download)
        assert stock.live_count == len(live)
        for commit in COMMITS[1:]:
            for name in NAMES:
                having = {
                    node
                    for (node, of), model in cached.items()
                    if of == commit and (model.whole or name in model.whole_files)
                } | {
                    d.node_id for d in live.values() if d.commit == commit and d.by_name[name].whole
                }
                assert set(stock.holders("o/n", commit, name)) == having
            for node in NODES:
                own = [d for d in live.values() if d.node_id == node and d.commit in ("", commit)]
                assert {d.download_id: d for d in stock.live(node, "o/n", commit)} == {
                    d.download_id: d for d in own
                }
            fetching = {d.download_id for d in live.values() if d.commit == commit}
            assert {d.download_id for d in stock.fetching("o/n", commit)} == fetching
    for (node, _), model in cached.items():
        stock.drop_cached(node, model)
    for download in live.values():
        stock.drop_live(download)
    assert (stock.live_count, stock.holders("o/n", COMMITS[1], "x")) == (0, frozenset())
