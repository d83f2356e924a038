"""qconvert: checkpoints as users have them, into the file a serving runtime loads."""

__version__ = "0.1.0"
