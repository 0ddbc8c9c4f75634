"""Options that several commands have: of any, and of those that examine a model."""
