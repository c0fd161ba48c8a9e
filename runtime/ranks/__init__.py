"""Process groups, and the exchanges by which ranks agree on steps and report failures."""
