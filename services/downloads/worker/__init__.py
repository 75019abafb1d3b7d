"""The part of downloads that runs on each node: reads its cache folder, and fetches.

Import `DownloadsWorker` from services.downloads.worker.worker. This package itself imports
nothing, because the fetching child process starts through it.
"""
