"""`python -m services.cli` is `shardring`."""

from services.cli.main import main

main()
