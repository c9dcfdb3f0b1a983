"""The value types of the public API, such as handles, deliveries and statistics. They have no behaviour."""

from aiotensor.types.broadcast_statistics import PublisherStatistics, SubscriberLag, SubscriberStatistics
from aiotensor.types.declaring import MAX_BOUNDS, MAX_ERROR_NAMES, Export, Holder, Waits, counter, gauge
from aiotensor.types.statistics import (
    ClientStatistics,
    EngineStatistics,
    PipeStatistics,
    ReceiverStatistics,
    SenderStatistics,
    ServerStatistics,
    Statistics,
)
from aiotensor.types.values import (
    MAX_NUMBER,
    CurveKey,
    Delivery,
    EngineName,
    Number,
    PeerEvent,
    Publication,
    Published,
    Seconds,
    TensorHandle,
    Usage,
)

__all__ = [
    "MAX_BOUNDS",
    "MAX_ERROR_NAMES",
    "MAX_NUMBER",
    "ClientStatistics",
    "CurveKey",
    "Delivery",
    "EngineName",
    "EngineStatistics",
    "Export",
    "Holder",
    "Number",
    "PeerEvent",
    "PipeStatistics",
    "Publication",
    "Published",
    "PublisherStatistics",
    "ReceiverStatistics",
    "Seconds",
    "SenderStatistics",
    "ServerStatistics",
    "Statistics",
    "SubscriberLag",
    "SubscriberStatistics",
    "TensorHandle",
    "Usage",
    "Waits",
    "counter",
    "gauge",
]
