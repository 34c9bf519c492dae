"""One process, one model: what reversible training costs and saves beside its peers."""
