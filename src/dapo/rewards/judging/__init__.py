"""Judges: a model behind an OpenAI-compatible server scores responses by a rubric; asked once, within a budget."""

JUDGE_FOLDER = "judge"  # in a run's
