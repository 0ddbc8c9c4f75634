"""Mathematical answers: where the answer stands, what it says, and whether it has the reference's value."""
