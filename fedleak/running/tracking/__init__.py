"""A scored run in the trackers of others: MLflow and TensorBoard."""
