"""Before training: reports on stages, memory budgets, forecasts, warnings of late gradients."""
