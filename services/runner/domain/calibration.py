"""How fast a node is, as its own runner found out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """What MLX really reaches on this machine; both above 0."""

    # Bytes of weights read per second in one-token matrix-vector products over more weights than
    # caches hold, as decoding does.
    weight_bytes_per_second: int
    # In matrix products with many tokens at once, as prefill does.
    multiply_adds_per_second: int
