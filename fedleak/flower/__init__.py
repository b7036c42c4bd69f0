"""The Flower side: apps, grids and engines. Only this room and the tap know Flower."""
