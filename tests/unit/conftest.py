"""How hypothesis runs here: how long an example takes says something of the machine only."""

import hypothesis

hypothesis.settings.register_profile("strata", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("strata")
