"""A Flower app as others write them."""
