"""Queues of messages that contain tensors, between several producers and consumers of one machine.

    queue = MessageQueue(producers=3, consumers=2)

    producer                                              consumer
    await producer.put({"frames": frames})   ──────────▶  async for message in consumer:
                                             ◀──────────      ...

A producer has a `MessageClient` of all consumers, and each consumer a `MessageServer`. `put` places a message
in shared memory, and the client sends it to a consumer that has capacity. The message asks for no answer: its
permit returns when the consumer takes it.

``queue`` is the public interface, and ``producer`` and ``consumer`` contain the objects that it returns.
``folder`` contains the locked files that show which producers and consumers are open, and how the others have
ended.
"""

from aiotensor.queues.consumer import ConsumerStatistics, QueueConsumer
from aiotensor.queues.producer import ProducerStatistics, QueueProducer
from aiotensor.queues.queue import MessageQueue

__all__ = ["ConsumerStatistics", "MessageQueue", "ProducerStatistics", "QueueConsumer", "QueueProducer"]
