"""What `transformers` calls our models, their fields and their tensors, both ways; nothing of it is imported."""
