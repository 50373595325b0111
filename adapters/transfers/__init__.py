"""Weight transfers: how tensors travel from the trainer to the engines."""
