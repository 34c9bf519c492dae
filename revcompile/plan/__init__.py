"""Before training: reports on stages, memory plans, forecasts, warnings about late gradients."""
