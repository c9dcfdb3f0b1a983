"""The model: where does a new scene begin?

Two frames of one scene have nearly the same colours, wherever things moved to. So each frame becomes a
histogram of its colours, and a scene begins where the histogram jumps.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from aiotensor.cli.demo.messages import Cut

__all__ = ["SceneCuts"]


class SceneCuts(nn.Module):
    """Find scene cuts by the distance of colour histograms.

    Args:
        levels: into how many levels each of red, green and blue is divided; the histogram has their cube.
        threshold: the distance, from 0 (same colours) to 1 (no colour in common), that makes a cut.
        grid: at most this many rows and columns of each frame are looked at, evenly spread.
        chunk: frames looked at together; bounds the memory that the model takes.
    """

    weights: Tensor

    def __init__(self, *, levels: int = 8, threshold: float = 0.2, grid: int = 160, chunk: int = 32) -> None:
        super().__init__()
        self.bins = levels**3
        self.threshold = threshold
        self.grid = grid
        self.chunk = chunk
        self.levels = levels
        weights = torch.tensor([levels * levels, levels, 1], dtype=torch.int64, device="cpu")
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, frames: Tensor, checkpoint: Callable[[], None] = lambda: None) -> Tensor:
        """Return the distance of each frame from the one before it; the first one's is 0.

        Args:
            frames: uint8, (frames, height, width, 3).
            checkpoint: called between chunks, and may raise to give up.
        """
        if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3:
            raise ValueError(
                "expected uint8 frames of (frames, height, width, 3), "
                f"got {frames.dtype} {tuple(frames.shape)}"
            )
        histograms = []
        for start in range(0, len(frames), self.chunk):
            checkpoint()
            histograms.append(self._histograms(frames[start : start + self.chunk]))
        stacked = torch.cat(histograms)
        jumps = (stacked[1:] - stacked[:-1]).abs().sum(dim=1) / 2
        return torch.cat([jumps.new_zeros(1), jumps])

    def _histograms(self, frames: Tensor) -> Tensor:
        rows, columns = (-(-size // self.grid) for size in frames.shape[1:3])
        pixels = frames[:, ::rows, ::columns].flatten(1, 2)
        level = pixels.to(torch.int64) * self.levels // 256
        colour = (level * self.weights).sum(dim=2)
        # One count for the whole chunk: each frame gets bins of its own.
        first_bin = torch.arange(len(frames), device=frames.device).unsqueeze(1) * self.bins
        counts = torch.bincount((colour + first_bin).flatten(), minlength=len(frames) * self.bins)
        return counts.view(len(frames), self.bins).to(torch.float32) / pixels.shape[1]

    def find(self, frames: Tensor, times: Tensor, checkpoint: Callable[[], None] = lambda: None) -> list[Cut]:
        """List the cuts of one video.

        Args:
            frames: uint8, (frames, height, width, 3).
            times: float64, (frames,), in seconds.
            checkpoint: called between chunks, and may raise to give up.
        """
        if times.shape != frames.shape[:1]:
            raise ValueError(
                f"expected one time for each of {len(frames)} frames, got shape {tuple(times.shape)}"
            )
        with torch.inference_mode():
            distances = self(frames, checkpoint)
            before = torch.cat([distances.new_zeros(1), distances[:-1]])
            # A jump over two frames is one cut: it begins where the distance first rises.
            begins = (distances > self.threshold) & (before <= self.threshold)
            return [
                Cut(frame=index, seconds=float(times[index]), distance=round(float(distances[index]), 3))
                for index in begins.nonzero().flatten().tolist()
            ]
