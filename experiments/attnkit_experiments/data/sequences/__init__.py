"""Long sequences to classify: the tasks of Long Range Arena."""
