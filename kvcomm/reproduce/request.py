"""What a user asks of a reproduction. Knows nothing of how it is made."""

from dataclasses import dataclass
from pathlib import Path

from kvcomm.packet import Preset

#: What rows may be asked for; baseline, skyline and kvcomm are always run.
CHOICES = ("kvcomm", "nld", "cipher", "ac")


@dataclass(frozen=True)
class Request:
    """The settings that all exhibits of a reproduction share.

    Attributes
    ----------
    models
        The sender and, where it is another, the receiver; as for `Model.load`.
    data
        The folder that holds the data files.
    out
        Where results go, and the runs that they come from.
    tasks
        Names of tasks; None: those of the paper's table or figure.
    methods
        Of `CHOICES`: rows of the tables that compare methods; kvcomm's are always there.
    limit
        Most records scored per task.
    preset
        "paper", or "reference" with the published protocol: calibration on the first records of the
        data, which are scored too.
    alpha
        Weight of the attention against the Gaussian; None: in preset paper what the paper has for
        the family of models (0.8 for Qwen and Falcon), else 1, as the published code runs.
    paper_pair
        Pair of the paper whose values stand beside; None: the closest.
    grid
        Figures over layers take every (layers / grid)-th; 0 takes every layer.
    answers
        Figures over settings generate answers too, and show the published metric; else they show
        `recovered` only, which needs none.
    """

    models: tuple[str, ...]
    data: Path
    out: Path
    tasks: tuple[str, ...] | None = None
    methods: tuple[str, ...] = CHOICES
    limit: int | None = None
    preset: Preset = "paper"
    alpha: float | None = None
    paper_pair: str | None = None
    grid: int = 8
    answers: bool = False
    batch_size: int = 8
    device: str = "cpu"
    dtype: str = "auto"
    progress: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.models) <= 2:
            raise ValueError(f"models: expected SENDER[,RECEIVER], found {len(self.models)} names")
        for name in self.methods:
            if name not in CHOICES:
                raise ValueError(f"methods: expected some of {', '.join(CHOICES)}, found {name!r}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected 1 or more records, found {self.limit}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: {self.alpha} is outside 0 .. 1")
        if self.grid < 0 or self.grid == 1:
            raise ValueError(f"grid: expected 0, or 2 and more steps, found {self.grid}")
        if self.batch_size < 1:
            raise ValueError(f"batch size: expected 1 or more, found {self.batch_size}")

    @property
    def same_model(self) -> bool:
        return len(set(self.models)) == 1
