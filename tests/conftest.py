"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# No deadline: the first call of a compiled loop takes seconds. Derandomized: a run that passed passes again.
settings.register_profile("onekv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("onekv")
