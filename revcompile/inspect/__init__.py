"""What people see: tables (drawings and traces come with the stages)."""
