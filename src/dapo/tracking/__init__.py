"""Metrics: declared once with unit and meaning, written as one JSON line a step, shown as one line a step."""
