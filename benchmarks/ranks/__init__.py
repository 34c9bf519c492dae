"""Several processes: how busy they are, whether plans come true, what survives a kill."""
