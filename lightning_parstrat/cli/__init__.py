"""The command line ``lightning-parstrat``: what to run a training with, and where, before it is run."""
