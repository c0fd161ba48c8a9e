"""Process groups, and the exchanges that let ranks agree or learn of a failure."""
