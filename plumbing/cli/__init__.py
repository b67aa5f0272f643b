"""The console, the errors and the flags of every program."""
