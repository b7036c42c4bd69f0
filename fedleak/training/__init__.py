"""A client's local work, and the server's honest aggregation."""
