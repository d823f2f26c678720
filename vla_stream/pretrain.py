"""The section `pretrain`: what the first policy imitates. Its sections are the config's, see config.py."""

from __future__ import annotations

from pydantic import Field

from vla_stream.sections import Count, PlainPath, Section

MAX_SEED = 2**63 - 1  # seeds.derive packs it into 8 bytes with a sign


class Data(Section):
    """Demonstrations recorded elsewhere, read where they lie: see learning/recordings.py."""

    path: PlainPath = Field(
        description="A LeRobotDataset's folder (v2.0 to v3.0), or a robomimic HDF5 file or a folder of such."
    )
    images: dict[str, str] | None = Field(
        default=None,
        description="Camera of the environment → key in the data. Default: what the environment knows of its "
        "simulator's files, else observation.images.<camera> or <camera>_image and the like.",
    )
    state: list[str] | None = Field(
        default=None, description="Keys whose numbers, side by side, are the state. Default: likewise."
    )
    actions: str | None = Field(default=None, description="Key of the actions. Default: action or actions.")
    instruction: str | None = Field(default=None, description="The sentence of all, instead of the data's own.")
    turned: bool | None = Field(
        default=None,
        description="Images lie upside down, turned by 180°. Default: as the environment knows of its simulator's "
        "files, else false.",
    )
    resize: bool = Field(default=False, description="Scale images to the environment's size; else others are refused.")
    episodes: Count | None = Field(default=None, ge=1, description="The first so many. Default: all.")


class Pretrain(Section):
    """Warm start by behaviour cloning, made once per run before the first update. All counts, no wall time."""

    demos: PlainPath | None = Field(default=None, description="File of `vla-stream demos`; default: made on the spot.")
    data: Data | None = Field(
        default=None, description="Demonstrations in a format of others, instead: {path: FOLDER or FILE}."
    )
    episodes: Count = Field(default=30, ge=1, description="Demonstrations to collect from the environment's expert.")
    action_noise: float = Field(default=0.3, ge=0, description="Noise on executed actions; labels stay clean.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the demonstrations, scenes and minibatches.")
    steps: Count = Field(default=400, ge=1, description="Gradient steps of behaviour cloning.")
    batch: Count = Field(default=64, ge=1, description="Samples per gradient step.")
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's learning rate of behaviour cloning.")
    grounding_scenes: Count = Field(default=0, ge=0, description="Random scenes for perception pre-training; 0: none.")
    grounding_steps: Count = Field(default=600, ge=0, description="Gradient steps of perception pre-training.")
    grounding_learning_rate: float = Field(default=3e-3, gt=0, description="Adam's first learning rate there.")

    @property
    def records(self) -> bool:
        """Whether a run has its demonstrations made, as nobody gave it any."""
        return self.demos is None and self.data is None

    def problems(self) -> list[str]:
        """Combinations that cannot work, each naming both fields and the remedy."""
        problems = []
        if self.demos is not None and self.data is not None:
            problems.append("pretrain.demos and pretrain.data are both set; remove one, since a warm start reads one")
        if self.data is not None and self.grounding_scenes:
            problems.append(
                f"pretrain.grounding_scenes is {self.grounding_scenes} but pretrain.data is set, which holds no "
                "scenes; set it to 0"
            )
        return problems
