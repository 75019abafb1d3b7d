"""A shard's child that computes each prompt in one piece, to compare with."""

from functools import partial

from services.runner import child
from services.runner.domain.schedule import Schedule
from services.runner.engine import shard

# Longer than the context of any model here.
_CHUNK_TOKENS = 2**20

if __name__ == "__main__":
    vars(shard)["Schedule"] = partial(Schedule, chunk_tokens=_CHUNK_TOKENS)
    child.main()
