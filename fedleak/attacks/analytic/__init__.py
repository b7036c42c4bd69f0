"""What single rows and small tensors of an update give away, in closed form."""
