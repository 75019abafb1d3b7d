"""Says where a model may be cut into stages, from its config.json alone. A program.

    python -m services.runner.engine.probe ARCHITECTURE < config.json

ARCHITECTURE is the module of mlx_lm.models that implements it, such as "llama". Prints a line of
JSON: {"layer_count": 4, "cuts": [1, 2, 3], "obstacle": ""}; see `services.runner.engine.stage`.
Takes neither the memory nor the time that the model would: no weight is ever made.
"""

import importlib
import importlib.util
import json
import resource
import sys
import types

# Many times what a model without weights takes; and bounds for an absurd config.json.
_MOST_BYTES = 4 * 2**30
_MOST_SECONDS = 60


def main() -> None:
    """Trace the architecture named on the command line."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    config = json.load(sys.stdin)
    _without_its_front("mlx_lm")

    import mlx.core as mx

    from services.runner.engine.stage import allowed_cuts

    # Computes nothing; and a GPU has other things to do than to be opened for that.
    mx.set_default_device(mx.cpu)
    architecture = importlib.import_module(f"mlx_lm.models.{sys.argv[1]}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    cuts, obstacle = allowed_cuts(model)
    print(json.dumps({"layer_count": len(model.layers), "cuts": cuts, "obstacle": obstacle}))


def _without_its_front(package: str) -> None:
    """Have a package's modules imported without its __init__, whose tokenizers and hub client take
    many times as long as all the rest of this program."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    stub = types.ModuleType(package)
    stub.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = stub


if __name__ == "__main__":
    main()
