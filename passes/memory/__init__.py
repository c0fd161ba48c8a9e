"""What is held between forward and backward: saved, or computed again."""
