"""The reversible model inside other libraries."""
