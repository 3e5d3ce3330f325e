"""The parts of the page of an evaluation."""
