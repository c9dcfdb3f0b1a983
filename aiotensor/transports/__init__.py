"""The transfer of records and descriptors between a sender and a receiver."""
