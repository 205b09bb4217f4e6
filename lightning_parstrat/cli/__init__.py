"""The command line ``lightning-parstrat``: prepares trainings, checks machines, and reads checkpoints."""
