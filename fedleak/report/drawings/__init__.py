"""Drawings of sweeps."""
