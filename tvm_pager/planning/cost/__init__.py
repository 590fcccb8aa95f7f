"""What an iteration costs: with a plan, and by how much of its activations is swapped."""
