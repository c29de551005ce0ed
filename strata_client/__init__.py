"""strata-client: maps memory that vmmd leases and generates text from it."""
