"""What to do and doing it: recipes, planning, execution, reports, command line."""
