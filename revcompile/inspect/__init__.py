"""What people see: tables, code, the story of a block, drawings."""
