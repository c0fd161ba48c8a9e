"""Process groups, and the exchanges by which ranks agree and report failures."""
