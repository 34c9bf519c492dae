"""Before training: what each stage may keep (budget), and what a cluster would do (forecast)."""
