"""The papers' mathematics as pure functions on tensors."""
