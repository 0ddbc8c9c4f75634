"""A trained model for others: a Hugging Face folder, its card, and the record of its run."""
