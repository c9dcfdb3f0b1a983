"""`aiotensor top`: shows the usage of a running receiver and its senders, or of a publisher."""
