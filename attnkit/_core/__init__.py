"""The ground floor: checks, visibility, scores, dispatch. Nothing here knows an op by name."""
