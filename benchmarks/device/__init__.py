"""An emulated device: blocks of the lab's models take the time of a recorded profile, and leave the core free."""
