"""Made-up images, sounds and clips with questions about them. Each sample follows from its number alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from patchgen.runtime.data.records import Record

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 70, 220), "yellow": (230, 210, 50)}
NOTES = {"A": 440.0, "B": 493.88, "C": 523.25, "D": 587.33, "E": 659.26}
MOVES = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
SAMPLING_RATE = 16000
SAMPLES = 2000


class MadeUp:
    """Samples made by a function of their number, `numbers` of them; a position is how many were read.

    Args:
        contents: names what the samples are made of, where that is not the same in every installation.
    """

    def __init__(
        self, name: str, make: Callable[[int], dict[str, Any]], numbers: list[int], *, contents: str = ""
    ) -> None:
        self.name, self.contents = name, contents
        self.make = make
        self.numbers = numbers

    def read(self, position: int | None = None) -> Iterator[tuple[Record, int]]:
        for number in range(position or 0, len(self)):
            yield self[number], number + 1

    def fingerprint(self) -> list[Any]:
        return [self.name, len(self.numbers), self.numbers[:1], self.contents]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Record:
        return Record(f"{self.name}, sample {self.numbers[number]}", self.make(self.numbers[number]))


def image_sample(number: int) -> dict[str, Any]:
    """One or two images of a coloured shape, of different sizes."""
    draw = np.random.default_rng([1, number])
    content, answers = [], []
    for _ in range(1 + number % 2):
        colour, shape = draw.choice(list(COLOURS)), draw.choice(["square", "circle"])
        content.append({"type": "image", "image": picture(draw, COLOURS[colour], shape)})
        answers.append(f"a {colour} {shape}")
    return conversation([*content, text("What is in the image?")], " and ".join(answers))


def audio_sample(number: int) -> dict[str, Any]:
    """One or two tones, of different lengths."""
    draw = np.random.default_rng([2, number])
    names = draw.choice(list(NOTES), 1 + number % 2).tolist()
    content = [{"type": "audio", "audio": tone(draw, NOTES[name])} for name in names]
    return conversation([*content, text("Which notes?")], " ".join(names))


def video_sample(number: int) -> dict[str, Any]:
    """A clip of a square that moves."""
    draw = np.random.default_rng([3, number])
    move = draw.choice(list(MOVES))
    return conversation([{"type": "video", "video": clip(draw, MOVES[move])}, text("Where does it go?")], str(move))


def text_sample(number: int) -> dict[str, Any]:
    one, other = np.random.default_rng([4, number]).integers(0, 100, 2).tolist()
    return conversation([text(f"How much is {one} plus {other}?")], str(one + other))


def all_sample(number: int) -> dict[str, Any]:
    """An image, a clip and a tone in one conversation."""
    parts = [make(number)["messages"] for make in (image_sample, video_sample, audio_sample)]
    return {"messages": [message for messages in parts for message in messages]}


def omni_sample(number: int) -> dict[str, Any]:
    """In turn: all kinds in one sample, an image, a clip, a tone, text only."""
    return (all_sample, image_sample, video_sample, audio_sample, text_sample)[number % 5](number)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def conversation(content: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": [text(answer)]}]}


def picture(draw: np.random.Generator, colour: tuple[int, int, int], shape: str) -> np.ndarray:
    """`(height, width, 3)` uint8, 56 to 140 pixels a side."""
    height, width = draw.integers(56, 141, 2)
    y, x = np.mgrid[:height, :width]
    away = np.stack([abs(y - height / 2), abs(x - width / 2)]) / (min(height, width) / 3)
    inside = away.max(0) < 1 if shape == "square" else (away**2).sum(0) < 1
    out = np.full((height, width, 3), 245, dtype=np.uint8)
    out[inside] = colour
    return out


def tone(draw: np.random.Generator, frequency: float) -> dict[str, Any]:
    """A quarter to a whole second of a sine."""
    seconds = draw.uniform(0.25, 1.0)
    time = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    return {"array": (0.3 * np.sin(2 * np.pi * frequency * time)).astype(np.float32), "sampling_rate": SAMPLING_RATE}


def clip(draw: np.random.Generator, move: tuple[int, int]) -> np.ndarray:
    """`(frames, 64, 64, 3)` uint8, 4 to 8 frames."""
    frames = int(draw.integers(2, 5)) * 2
    out = np.full((frames, 64, 64, 3), 20, dtype=np.uint8)
    for number in range(frames):
        y, x = (24 + step * (number - frames // 2) * 5 for step in move)
        out[number, y : y + 16, x : x + 16] = 230
    return out


MEDIA = {"vision": image_sample, "audio": audio_sample, "video": video_sample, "omni": omni_sample}
