"""The transport between machines: records and bytes of blocks in messages of ZeroMQ."""
