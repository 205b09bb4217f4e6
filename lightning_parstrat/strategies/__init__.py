"""Lightning's side of the package: thin strategies over :mod:`lightning_parstrat.distributed`."""
