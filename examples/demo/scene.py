"""The model: it finds the frames at which a new scene begins.

Frames of the same scene have nearly the same colours, even if objects move. So the model computes a histogram
of the colours of each frame, and a scene begins where the histogram changes abruptly.
"""

import torch
from torch import Tensor, nn

from demo.messages import Cut
from demo.threads import Checkpoint, no_checkpoint

__all__ = ["SceneCuts"]


class SceneCuts(nn.Module):
    """Find scene cuts by the distance of colour histograms.

    Args:
        levels: the number of levels of red, green and blue; the histogram has ``levels ** 3`` bins.
        threshold: the least distance of a cut, from 0 (same colours) to 1 (no colour in common).
        grid: the maximum number of rows and columns of a frame that are sampled, evenly spaced.
        chunk: the number of frames per step, which bounds the memory of the model.
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

    def forward(self, frames: Tensor, checkpoint: Checkpoint = no_checkpoint) -> Tensor:
        """Return the distance of each frame from the previous one; 0 for the first frame.

        Args:
            frames: uint8, (frames, height, width, 3).
            checkpoint: called between chunks.
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
        # A single count for the whole chunk, in which each frame has separate bins.
        first_bin = torch.arange(len(frames), device=frames.device).unsqueeze(1) * self.bins
        counts = torch.bincount((colour + first_bin).flatten(), minlength=len(frames) * self.bins)
        return counts.view(len(frames), self.bins).to(torch.float32) / pixels.shape[1]

    def find(self, frames: Tensor, times: Tensor, checkpoint: Checkpoint = no_checkpoint) -> list[Cut]:
        """Return the cuts of a video.

        Args:
            frames: uint8, (frames, height, width, 3).
            times: float64, (frames,), in seconds.
            checkpoint: called between chunks.
        """
        if times.shape != frames.shape[:1]:
            raise ValueError(
                f"expected one time for each of {len(frames)} frames, got shape {tuple(times.shape)}"
            )
        with torch.inference_mode():
            distances = self(frames, checkpoint)
            before = torch.cat([distances.new_zeros(1), distances[:-1]])
            # A change over two frames is one cut, which begins at the first of them.
            begins = (distances > self.threshold) & (before <= self.threshold)
            return [
                Cut(frame=index, seconds=float(times[index]), distance=round(float(distances[index]), 3))
                for index in begins.nonzero().flatten().tolist()
            ]
