"""The report of a study: results, claims, plots, pages."""
