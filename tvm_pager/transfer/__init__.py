"""Moves bytes between tiers, decides nothing. Empty: the torch-free core imports `protocol`."""
