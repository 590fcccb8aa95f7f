"""Recorded iterations: as values, as files, and as indexes for who uses what when."""
