"""From documents on disk or on the hub to the windows of tokens that a run reads."""
