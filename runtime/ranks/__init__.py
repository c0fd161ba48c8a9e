"""Process groups, and the exchanges by which ranks agree or learn of a failure."""
