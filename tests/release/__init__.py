"""What is checked of a release: its files, an installation of them, a user's side of it, other Pythons and torches."""
