"""The small values that users hold: handles, deliveries and statistics. No behaviour."""

from aiotensor.types.declaring import MAX_BOUNDS, MAX_ERROR_NAMES, Export, Holder, Waits, counter, gauge
from aiotensor.types.statistics import (
    ClientStatistics,
    PipeStatistics,
    PublisherStatistics,
    ReceiverStatistics,
    SenderStatistics,
    ServerStatistics,
    Statistics,
    SubscriberLag,
    SubscriberStatistics,
)
from aiotensor.types.values import (
    MAX_NUMBER,
    CurveKey,
    Delivery,
    Number,
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
    "Export",
    "Holder",
    "Number",
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
