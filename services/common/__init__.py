"""What every service shares: server, channels, errors, telemetry, options."""

import os

# gRPC's C core reads this once, when it is first imported. Its own lines about refused ports and
# lost connections would stand beside ours, which say the same in words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
