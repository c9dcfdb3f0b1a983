"""The links between processes: connections, their admission, and the search for the process at an address."""
