"""API servers and an engine core run without a GPU, over vLLM's own tensor queue."""

from pathlib import Path
from typing import Any

import torch
from vllm.v1.engine.core_client import AsyncMPClient

from tests.vllm.serving import engine_config, generate, request, serving
from tests.vllm.stand_in import checksum


def video(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 8, 64, 64), dtype=torch.uint8, generator=torch.manual_seed(seed))


async def send_videos(client: AsyncMPClient, count: int, index: int) -> dict[str, Any]:
    requests = []
    expected = {}
    for number in range(count):
        name = f"{index}-{number}"
        pixels, grid = video(100 * index + number), torch.tensor([3, 4, 4])
        requests.append(request(name, [{"pixel_values_videos": pixels, "video_grid_thw": grid}]))
        expected[name] = [checksum([pixels, grid])]
    assert await generate(client, *requests) == expected
    return {name: tokens[0] for name, tokens in expected.items()}


def test_three_servers_send_videos_to_one_engine(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    with serving(config, servers=3, target=send_videos, argument=4) as running:
        results = running.results()
    assert [len(result) for result in results] == [4, 4, 4]
