"""Seeded bugs, and the tests that must see each of them: `make mutants`."""
