"""What is trained and how: the model, its presets, the way it is split, the training; `Job` holds all three.

Everything is checked here, once, by rules that name flag, value and rule; what the user typed becomes a Job in
configure.py. No kernel, no collective, no time.
"""
