"""A checkpoint for others: what it says of its model, read without a run, and written as another library's files."""
