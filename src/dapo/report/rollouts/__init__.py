"""Recorded rollouts as the report shows them: the steps on disk, their index, and the scripts the browser reads."""
