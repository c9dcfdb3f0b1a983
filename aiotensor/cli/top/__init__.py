"""`aiotensor top`: the state of a running receiver and its senders, as `aiotensor.inspection` reports it."""
