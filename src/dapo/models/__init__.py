"""Language models as the trainer sees them: load and save, packed forward, log-probs without the logits, a critic."""
