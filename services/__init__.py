"""Shardring's services, one package each."""
