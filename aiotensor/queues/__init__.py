"""Queues of messages that contain tensors, between several producers and consumers of one machine.

    queue = MessageQueue(producers=3, consumers=2)

    producer                                              consumer
    await producer.put({"frames": frames})   ──────────▶  async for message in consumer:
                                             ◀──────────      ...

A producer is a `MessageClient` of all consumers, each of which has a `MessageServer` and a `TensorReceiver`.
`put` accepts a message, and a task sends it as a request to a consumer that can take it. The answer means
that the message was taken.

``queue`` is the public interface, and ``producer`` and ``consumer`` contain the objects that it returns.
``deliveries`` delivers the messages of a producer. ``folder`` contains the locked files that show which
producers and consumers are open, and how the others have ended.
"""

from aiotensor.queues.consumer import QueueConsumer
from aiotensor.queues.producer import QueueProducer
from aiotensor.queues.queue import MessageQueue
from aiotensor.queues.statistics import ConsumerStatistics, ProducerStatistics

__all__ = ["ConsumerStatistics", "MessageQueue", "ProducerStatistics", "QueueConsumer", "QueueProducer"]
