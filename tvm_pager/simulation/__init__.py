"""The pager on a virtual clock, fed with a trace: how fast would it be, and how fast could it be.

Torch-free.
"""
