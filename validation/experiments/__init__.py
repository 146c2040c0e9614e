"""One folder an experiment; protocols/<id>.md says what it asks."""
