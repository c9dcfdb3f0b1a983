"""Valid and invalid messages to every kind of peer."""
