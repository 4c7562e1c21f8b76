"""The command line.

Not here: anything that another program would want to call.
"""
