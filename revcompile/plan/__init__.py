"""What a cut will take, before anything is trained: memory budgets and forecasts."""
