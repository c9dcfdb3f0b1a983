"""`aiotensor doctor`: checks this machine, and gives advice. Each check returns a `Finding`."""
