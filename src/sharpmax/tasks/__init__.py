"""Tasks: data, models, training and scoring."""
