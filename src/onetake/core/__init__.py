"""The mathematics of an update: records, noise, transitions, selections, advantages, objectives and their coefficients.

Not here: models, processes, files, or anything that runs.
"""
