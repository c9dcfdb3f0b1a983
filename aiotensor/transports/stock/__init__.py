"""The transport over a stock queue of multiprocessing: many senders write to its pipe, one receiver reads it.

It is for applications that cannot replace their queue with a `TensorQueue`. The pipe of a queue carries no
descriptors, so each connection also has a record socket between the two processes, for the records to the
sender, and for descriptors in both directions.

    sender                                        receiver
      | listens at an address without a file         |
      |== first chunk: the name of the address =====>|
      |<-------------- connects ---------------------|
      |== records, in chunks on the queue ==========>|
      |--- descriptors, before their record -------->|
      |<-- records with their descriptors -----------|

The kernel notifies each side when the other one ends. The records that a sender wrote before that are read
first. Nothing is pickled, and the locks of the queue are not used.
"""
