"""OpenAI and Anthropic APIs in front of the cluster: the smg gateway, kept up to date."""
