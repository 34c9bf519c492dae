"""Before training: what stages are (report) and may keep (budget), what a cluster would do."""
