"""huggingface_hub alone, to be compared with: fetch a model and say how many seconds it took.

python -m tests.benchmarks.snapshot MODEL_ID ENDPOINT CACHE_FOLDER
"""

import sys
import time

from huggingface_hub import snapshot_download


def main(model_id: str, endpoint: str, cache: str) -> None:
    """Fetch the model into an empty cache folder."""
    began = time.perf_counter()
    snapshot_download(model_id, endpoint=endpoint, cache_dir=cache, token=False)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
