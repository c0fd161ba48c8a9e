"""Process groups, and what ranks tell each other of failures."""
