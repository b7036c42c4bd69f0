"""The ServerApp: sends out the model, captures what comes back, and sums it."""
