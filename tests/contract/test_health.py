"""What the probes of a cluster see while an engine is paused."""
