"""Queues, as a type checker sees them: checked by mypy, never run."""

from typing import Any, assert_type

import msgspec
import torch

from aiotensor import blocking
from aiotensor.queues import (
    ConsumerStatistics,
    MessageQueue,
    ProducerStatistics,
    QueueConsumer,
    QueueProducer,
)


class Video(msgspec.Struct):
    """A message."""

    frames: torch.Tensor


async def use() -> None:
    """Use every method of a queue."""
    with MessageQueue(Video, producers=3, consumers=2, redeliver=False, grace_s=None) as queue:
        assert_type(queue, MessageQueue[Video])
        assert_type(MessageQueue(folder="/run/user/1000/frames"), MessageQueue[Any])
        async with queue.producer() as producer, queue.consumer() as consumer:
            assert_type(producer, QueueProducer)
            assert_type(consumer, QueueConsumer[Video])
            await producer.put(Video(torch.zeros(1)), timeout=5)
            producer.put_nowait(Video(torch.zeros(1)))
            await producer.join()
            producer.abort()
            assert_type(producer.statistics(), ProducerStatistics)
            assert_type(await consumer.get(timeout=5), Video)
            assert_type(consumer.get_nowait(), Video)
            assert_type(consumer.statistics(), ConsumerStatistics)
            async for video in consumer:
                assert_type(video, Video)


def use_in_a_thread() -> None:
    """Use every method of a blocking queue."""
    with blocking.MessageQueue(Video, producers=3, consumers=2) as queue:
        assert_type(queue, blocking.MessageQueue[Video])
        assert_type(blocking.MessageQueue(), blocking.MessageQueue[Any])
        queue.put(Video(torch.zeros(1)), timeout=5)
        queue.put_nowait(Video(torch.zeros(1)))
        queue.join(timeout=5)
        assert_type(queue.get(timeout=5), Video)
        assert_type(queue.get_nowait(), Video)
        for video in queue:
            assert_type(video, Video)
        with queue.producer() as producer, queue.consumer() as consumer:
            producer.put(Video(torch.zeros(1)), timeout=5)
            producer.join(timeout=5)
            assert_type(producer.statistics(), ProducerStatistics)
            assert_type(consumer.get(timeout=5), Video)
            for video in consumer:
                assert_type(video, Video)
