"""What a run keeps to go on later: weights, optimizer, schedule, random states and position in the data."""
