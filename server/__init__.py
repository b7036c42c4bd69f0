"""The Flower ServerApp: an honest aggregator that keeps what it receives."""
