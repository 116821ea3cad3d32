"""In: the combinations of a text experiment; out: one saved experiment for each, the twelve steps in order.

A combination is one experiment with an id of its own. Its files are written once all of it is measured, and it is done
once it stands in `results/{task_type}_results.json`: a run that was killed starts again at the combination it was at.
"""
