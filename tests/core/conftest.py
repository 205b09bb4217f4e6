from hypothesis import settings

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("lightning_parstrat", deadline=None, print_blob=True)
settings.load_profile("lightning_parstrat")
