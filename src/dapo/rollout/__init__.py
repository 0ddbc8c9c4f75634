"""Inference engines behind one streaming protocol."""
