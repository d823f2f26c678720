"""Any gymnasium environment, by its id. Rows are single environments side by side in one process, stepped in turn.

Single ones and not gymnasium's vectors: a vector steps all of its rows, in every autoreset mode, and here a row that is
held, or whose slot is idle, must stay untouched. A single environment never resets itself, so what `step` returned is
the observation before the reset. Its time limit is `environment.max_steps`, in place of the registered one.

    state        f32[B, S]: the observation's numbers, flattened; discrete parts as one-hot. One zero if there are none.
    images       u8[B, height, width, 3] from parts of the observation (grey or RGB, channels first or last), or from
                 `render()`, which is called only when an image is read: before the row's next step or reset
    instruction  fixed, or what the environment itself tells at a reset
    actions      f32[B, A] in [-1, 1]; spaces.py says what becomes of them. Of Discrete(n) the largest of n numbers is
                 chosen: the choice is part of the environment, so a Gaussian policy's log-prob stays exact

gymnasium is imported when a batch is made, so that `Options` can be read without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from vla_stream import plugins
from vla_stream.config import Section
from vla_stream.environments import spaces
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

RENDER = "render"
ONLY_CAMERA = "front"  # the name of an image that is the whole observation
SUCCESS_KEYS = ("is_success", "success")


class Gymnasium:
    """B environments of one id."""

    class Options(Section):
        """Options of `environment.options` when `environment.name` is gymnasium or gymnasium-apart."""

        id: str = Field(description="The id, such as CartPole-v1, or module:id where importing module registers it.")
        kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment itself.")
        images: dict[str, str] | None = Field(
            default=None,
            description="Camera name → render, or the key (a.b if nested) of a part of the observation; {}: no image. "
            "Default: every part of the observation that looks like an image.",
        )
        image_size: int | None = Field(
            default=None, ge=spaces.SMALLEST_IMAGE, le=1024, description="Width and height to scale images to, pixels."
        )
        state: list[str] | None = Field(
            default=None, description="Keys of the observation's parts that make up the state. Default: all but images."
        )
        instruction: str | None = Field(default=None, description="The sentence for the policy. Default: the id.")
        instruction_key: str | None = Field(
            default=None, description="Key of reset's info, or of the observation, that holds the sentence instead."
        )
        success: Literal["info", "terminated", "truncated"] = Field(
            default="info",
            description=f"What counts as success. info: one of its keys {', '.join(SUCCESS_KEYS)} is true; "
            "terminated: every end is a goal; truncated: the goal is to last until max_steps.",
        )
        success_return: float | None = Field(
            default=None, description="The return of a whole episode that counts as success, instead of `success`."
        )

    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False

    def __init__(self, rows: int, max_steps: int, options: Gymnasium.Options) -> None:
        """Make the environments. Raises InputError for what no restart can mend, else EnvironmentFailed."""
        self.rows, self.max_steps = rows, max_steps
        self._options = options
        self._envs: list[Any] = []
        try:
            for _ in range(rows):
                self._envs.append(_make(options, max_steps))
            first = self._envs[0]
            self._parts = spaces.parts_of(first.observation_space)
            self._sources = _sources(self._parts, options)
            self._state_parts = spaces.state_parts(self._parts, options.state, list(self._sources.values()))
            cameras = {name: self._image_size(name, source) for name, source in self._sources.items()}
            action_dims, self._to_env = spaces.action_reader(first.action_space)
        except BaseException:
            self.close()
            raise
        self.specification = Specification(cameras, spaces.state_dims(self._state_parts), action_dims)
        blank = _Frame(cameras, {name: np.zeros((*size, 3), np.uint8) for name, size in cameras.items()}, None)
        nothing = np.zeros(self.specification.state_dims, np.float32)
        sentence = options.instruction or options.id.rpartition(":")[2]
        self._rows = [_Row(blank, nothing, sentence) for _ in range(rows)]

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """See the protocol. Rows that were never reset show zeros."""
        for index in map(int, np.flatnonzero(mask)):
            row, env = self._rows[index], self._envs[index]
            row.frame.expire()
            with _failing_as(f"{self._options.id}: reset failed in row {index}"):
                observation, info = env.reset(seed=_short_seed(int(seeds[index])))
                self._look(row, env, observation)
                row.sentence = self._sentence(row.sentence, observation, info)
            row.running, row.total = True, 0.0
        return self._observations()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """See the protocol. Raises EnvironmentFailed: a bad action, a row that is not running, an error inside."""
        self._check(actions, active)
        reward = np.zeros(self.rows, dtype=np.float32)
        terminated, truncated, success = (np.zeros(self.rows, dtype=bool) for _ in range(3))
        for index in map(int, np.flatnonzero(active)):
            row, env = self._rows[index], self._envs[index]
            row.frame.expire()
            with _failing_as(f"{self._options.id}: step failed in row {index}"):
                observation, earned, ended, cut, info = env.step(self._to_env(actions[index]))
                self._look(row, env, observation)
                reward[index] = earned
            row.total += float(earned)
            row.running = not (ended or cut)
            # A row that is both has ended: there is nothing after it to bootstrap from.
            terminated[index], truncated[index] = bool(ended), bool(cut and not ended)
            success[index] = self._succeeded(row, bool(ended), bool(cut and not ended), info)
        return StepResult(self._observations(), reward, terminated, truncated, success)

    def close(self) -> None:
        """Release the environments. Idempotent."""
        envs, self._envs = self._envs, []
        for env in envs:
            with suppress(Exception):  # one that fails while it goes away has nothing left to tell
                env.close()

    def _succeeded(self, row: _Row, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
        if self._options.success_return is not None:
            return not row.running and row.total >= self._options.success_return
        if self._options.success == "info":
            return any(bool(np.any(info[key])) for key in SUCCESS_KEYS if key in info)
        return terminated if self._options.success == "terminated" else truncated

    def _look(self, row: _Row, env: Any, observation: Any) -> None:
        # Copies: an environment may reuse its buffers, and observations are kept until a segment is complete.
        raw = {
            name: np.array(self._parts[source].of(observation))
            for name, source in self._sources.items()
            if source != RENDER
        }
        row.frame = _Frame(self.specification.cameras, raw, env)
        row.state = spaces.read_state(self._state_parts, observation)

    def _sentence(self, before: str, observation: Any, info: Mapping[str, Any]) -> str:
        key = self._options.instruction_key
        if key is None:
            return before
        if key in info:
            return str(info[key])
        if key in self._parts:
            return str(self._parts[key].of(observation))
        raise InputError(
            f"environment.options.instruction_key is {key!r}, which is not in the info of reset "
            f"({', '.join(info) or 'it is empty'}), nor in the observation; {spaces.known(self._parts)}"
        )

    def _observations(self) -> Observations:
        images = _Images([row.frame for row in self._rows], self.specification.cameras)
        state = np.stack([row.state for row in self._rows])
        return _LazyObservations(images, state, [row.sentence for row in self._rows])

    def _image_size(self, name: str, source: str) -> tuple[int, int]:
        """(height, width). What `render` returns is known only after it was called."""
        if source != RENDER:
            shot = np.zeros(self._parts[source].space.shape, np.uint8)
        else:
            with _failing_as(f"{self._options.id}: render failed"):
                self._envs[0].reset(seed=0)
                shot = self._envs[0].render()
            if not spaces.is_image(getattr(shot, "dtype", None), getattr(shot, "shape", ())):
                raise InputError(
                    f"environment.options.images: {name} is render, but {self._options.id} renders a "
                    f"{type(shot).__name__}, expected an image; name a part of the observation, or set images: {{}}"
                )
        size = self._options.image_size
        height, width, _ = spaces.as_rgb(shot).shape
        return (height, width) if size is None else (size, size)

    def _check(self, actions: np.ndarray, active: np.ndarray) -> None:
        expected = (self.rows, self.specification.action_dims)
        if actions.shape != expected or not np.isfinite(actions[active]).all():
            shown = " ".join(np.array2string(actions, threshold=16).split())
            raise EnvironmentFailed(
                f"{self._options.id}: actions {shown} of shape {list(actions.shape)}, "
                f"expected finite numbers of shape {list(expected)}"
            )
        for index in map(int, np.flatnonzero(active)):
            if not self._rows[index].running:
                raise EnvironmentFailed(f"{self._options.id}: step of row {index}, which is not running; reset it")


class GymnasiumApart(Gymnasium):
    """The same, one process per row: for environments that are slow, or that cannot share a process."""

    rows_per_process: ClassVar[int | None] = 1


@dataclass(slots=True)
class _Row:
    """What one environment showed last, and its episode so far."""

    frame: _Frame
    state: np.ndarray
    sentence: str
    running: bool = False
    total: float = 0.0  # of its rewards


class _Frame:
    """What the cameras of one row see at one moment; made when it is read. raw: images as the observation has them."""

    __slots__ = ("_cameras", "_env", "_images", "_raw")

    def __init__(self, cameras: Mapping[str, tuple[int, int]], raw: Mapping[str, np.ndarray], env: Any) -> None:
        self._cameras, self._raw, self._env = cameras, raw, env
        self._images: dict[str, np.ndarray] = {}

    def expire(self) -> None:
        """The environment moves on: what was not rendered is gone."""
        self._env = None

    def image(self, camera: str) -> np.ndarray:
        """u8[height, width, 3]."""
        if camera not in self._images:
            self._images[camera] = spaces.scaled(spaces.as_rgb(self._read(camera)), self._cameras[camera])
        return self._images[camera]

    def _read(self, camera: str) -> np.ndarray:
        if camera in self._raw:
            return self._raw[camera]
        if self._env is None:
            raise EnvironmentFailed("gymnasium: an image is read after the next step or reset; read it before")
        with _failing_as("gymnasium: render failed"):
            return np.array(self._env.render())


class _Images(Mapping[str, np.ndarray]):
    """The images of some rows."""

    def __init__(self, frames: Sequence[_Frame], cameras: Mapping[str, tuple[int, int]]) -> None:
        self.frames, self.cameras = frames, cameras

    def __getitem__(self, camera: str) -> np.ndarray:
        if camera not in self.cameras:
            raise KeyError(camera)
        return np.stack([frame.image(camera) for frame in self.frames])

    def __iter__(self) -> Iterator[str]:
        return iter(self.cameras)

    def __len__(self) -> int:
        return len(self.cameras)


class _LazyObservations(Observations):
    """Observations of which `take` renders the taken rows at once, since they are kept, and no others."""

    __slots__ = ()

    def take(self, rows: Sequence[int] | np.ndarray) -> Self:
        if not isinstance(self.images, _Images):
            return super().take(rows)
        index = np.asarray(rows, dtype=np.int64)
        images = dict(_Images([self.images.frames[i] for i in index], self.images.cameras))
        return type(self)(images, self.state[index], [self.instruction[i] for i in index])


def _make(options: Gymnasium.Options, max_steps: int) -> Any:
    """One environment with our time limit. Raises InputError for an id or arguments that do not exist."""
    module, _, _ = options.id.rpartition(":")
    if module:
        plugins.check_allowed(module, "environment.options.id")
    import gymnasium
    from gymnasium.error import Error

    kwargs = dict(options.kwargs)
    if RENDER in (options.images or {}).values():
        kwargs.setdefault("render_mode", "rgb_array")
    try:
        return gymnasium.make(options.id, max_episode_steps=max_steps, disable_env_checker=True, **kwargs)
    except (Error, ImportError, TypeError) as exc:
        raise InputError(
            f"environment.options.id is {options.id}: {_one_line(exc)}; expected an id that gymnasium knows "
            "(module:id where a module registers it), its packages, and kwargs that it takes"
        ) from exc
    except Exception as exc:
        raise EnvironmentFailed(f"{options.id}: cannot be made: {type(exc).__name__}: {_one_line(exc)}") from exc


def _sources(parts: Mapping[str, spaces.Part], options: Gymnasium.Options) -> dict[str, str]:
    """Camera name → `render` or the key of a part. Raises InputError for a key that holds no image."""
    if options.images is None:
        return {ONLY_CAMERA if key == spaces.WHOLE else key: key for key, part in parts.items() if part.is_image}
    for name, source in options.images.items():
        if source != RENDER and not (source in parts and parts[source].is_image):
            raise InputError(
                f"environment.options.images: {name} is {source!r}, expected render, or a part of the observation that "
                f"is an image (bytes, grey or RGB); {spaces.known(parts)}"
            )
    return dict(options.images)


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Whatever an environment raises becomes an EnvironmentFailed, or an InputError where a package is missing."""
    from gymnasium.error import DependencyNotInstalled

    try:
        yield
    except (EnvironmentFailed, InputError):
        raise
    except DependencyNotInstalled as exc:
        raise InputError(f"{what}: {_one_line(exc)}") from exc
    except Exception as exc:
        raise EnvironmentFailed(f"{what}: {type(exc).__name__}: {_one_line(exc)}") from exc


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())


def _short_seed(seed: int) -> int:
    # Some environments feed it to generators of 32 bits with a sign; the seed sequence mixes all 64 of ours into 31.
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1
