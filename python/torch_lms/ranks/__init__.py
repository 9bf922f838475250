"""Who takes part in a distributed run, and what its ranks tell each other on the host."""
