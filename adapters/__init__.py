"""Everything that touches the world: engines over HTTP, weight transfers, observers and front ends."""
