"""The ClientApp: trains, defends, selects, encodes."""
