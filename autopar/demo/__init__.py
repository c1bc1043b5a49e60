"""The demo: plan a large GPT for a cluster that is not here, then train a small one on four local processes."""
