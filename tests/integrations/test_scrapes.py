"""Under load, the metrics of a server equal the load."""

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integrations import engine
from tests.integrations.scenes import UPLOAD, MiB, Scene, is_answered, scene
from tests.integrations.totals import PERMITS


async def scrape(on: Scene) -> dict[str, float]:
    """Read a page as Prometheus does, and add up each kind of sample; errors by their types."""
    page = await on.http.get("/metrics")
    assert page.status_code == 200
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            found[sample.name + sample.labels.get("type", "")] += sample.value  # type: ignore[assignment]
    return dict(found)


@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp"])
async def test_a_page_of_metrics_under_load_agrees_with_the_load_that_was_sent(
    kind: str, folder: Path
) -> None:
    async with scene(kind, folder, workers=1, max_wait_s=0.5) as on:
        [one] = on.engines
        await one.call(engine.slow_down, 0.05)
        await one.call(engine.serve, 1)
        turns, pages, is_over = asyncio.Semaphore(30), [await scrape(on)], asyncio.Event()

        async def upload() -> bool:
            async with turns:
                return is_answered(await on.http.post("/totals", content=UPLOAD))

        async def watch() -> None:
            while not is_over.is_set():
                pages.append(await scrape(on))

        watching = asyncio.create_task(watch())
        answered = Counter(await asyncio.gather(*[upload() for _ in range(90)]))
        is_over.set()
        await watching

        # The permit of the last upload comes back by another way than its answer.
        while (last := await scrape(on))["aiotensor_sender_permits_in_use"]:
            pass
        assert answered[True] >= PERMITS
        assert answered[False]
        assert last["aiotensor_client_answers_total"] == answered[True]
        assert last["aiotensor_sender_messages_sent_total"] == answered[True]
        assert last["aiotensor_sender_tensors_sent_total"] == answered[True]
        assert last["aiotensor_sender_sent_bytes_total"] == answered[True] * MiB
        assert last["aiotensor_sender_copied_bytes_total"] == answered[True] * MiB
        assert last["aiotensor_sender_errors_totalWouldBlockError"] == answered[False]
        assert last["aiotensor_sender_wait_seconds_count"] >= answered[False]
        assert last["aiotensor_sender_permits_limit"] == PERMITS
        assert last["aiotensor_sender_permits_in_use"] == last["aiotensor_sender_waiting_calls"] == 0
        assert last["aiotensor_sender_permits_peak"] == PERMITS
        assert any(page["aiotensor_sender_waiting_calls"] for page in pages)
        assert any(page["aiotensor_client_in_flight"] for page in pages)
        for before, after in pairwise(pages):
            for name in before:
                if name.startswith("aiotensor") and "_total" in name:
                    assert before[name] <= after[name], name
        # And the engine says the same of its side.
        _, served = await one.call(engine.held)
        assert served.answers == answered[True]
