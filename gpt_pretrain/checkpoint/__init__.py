"""What a run keeps in order to continue later: weights, optimizer, schedule, random states and position in the data."""
