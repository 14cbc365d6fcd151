"""Proofs that cross rooms: the engine's whole law, dead memory, observed paths, seeded bugs."""
