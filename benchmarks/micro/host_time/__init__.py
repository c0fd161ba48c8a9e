"""Where a step's processor time goes: by thread, by room of the code, and by kind of work, beside other systems."""
