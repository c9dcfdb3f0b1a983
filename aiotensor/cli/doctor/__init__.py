"""`aiotensor doctor`: checks of this machine, and advice. A check is a function that returns a `Finding`."""
