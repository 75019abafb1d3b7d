"""How a ring is chosen: plain data in, a decision or a reasoned refusal out."""
