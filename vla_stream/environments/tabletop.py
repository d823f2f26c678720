"""A table with three coloured cubes and a pusher, in MuJoCo: the instruction names the cube to touch.

Touching the named cube ends the episode with reward 1, touching another one ends it with 0, so the words decide.
Images come from ray casting (`mj_multiRay`) with one flat colour per body: no OpenGL, no GPU, no system package.
mujoco is imported when a batch is made, so that `Options` can be read without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, field_validator

from vla_stream.config import Section
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed

COLOURS: Mapping[str, tuple[int, int, int]] = {"red": (214, 48, 40), "green": (40, 160, 60), "blue": (36, 84, 204)}
CAMERA = "front"
IMAGE_SIZE = 48
STATE_DIMS = 8
ACTION_DIMS = 3

_TABLE_COLOUR, _PUSHER_COLOUR, _FAR_COLOUR = (188, 170, 140), (60, 60, 66), (226, 230, 234)
_SUBSTEPS = 5
_STEP_M = 0.03  # set-point change of an action component of 1
_LEAD_M = 0.06  # the set-point stays this close to the tip, so that a blocked pusher does not wind up
_CUBE_HALF_M = 0.02
_CUBE_SPREAD_M = 0.13
_CUBE_DISTANCE_M = 0.08
_TIP_SPREAD_M = 0.10
_TIP_START_M = (0.08, 0.12)  # above the cubes' 4 cm, so that no start touches one
_WORKSPACE_LOW = np.array([-0.18, -0.18, 0.01])
_WORKSPACE_HIGH = np.array([0.18, 0.18, 0.14])
_HOVER_M = 0.07
_CAMERA_M = np.array([0.32, 0.0, 0.52])
_CAMERA_FOVY_DEG = 38.0


class Delay(Section):
    """A lognormal waiting time."""

    mean: float = Field(ge=0, description="Mean in milliseconds.")
    sigma: float = Field(default=0.5, ge=0, description="Standard deviation of the logarithm; 0: always the mean.")

    def draw_ms(self, random: np.random.Generator) -> float:
        """One waiting time: exp(N(ln mean − σ²/2, σ)), whose mean is `mean`."""
        return self.mean * math.exp(self.sigma * (random.standard_normal() - self.sigma / 2))


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Ids, addresses and rays that all rows share."""

    model: Any
    pusher_geom: int
    cube_geoms: np.ndarray
    colours: np.ndarray  # u8[geoms + 1, 3]; the last row is what a ray sees that hits nothing
    rays: np.ndarray  # f64[height * width, 3]


class _Scene:
    """What one row looked like at one moment. The image is made when somebody reads it, once."""

    __slots__ = ("_image", "_positions", "_renderer")

    def __init__(self, renderer: _Renderer, positions: np.ndarray) -> None:
        self._renderer = renderer
        self._positions = positions
        self._image: np.ndarray | None = None

    @property
    def image(self) -> np.ndarray:
        if self._image is None:
            self._image = self._renderer.image(self._positions)
        return self._image


class _LazyImages(Mapping[str, np.ndarray]):
    """The images of some rows. Three of a chunk's four observations are never looked at, so they cost no rays."""

    def __init__(self, scenes: Sequence[_Scene]) -> None:
        self._scenes = scenes

    def __getitem__(self, camera: str) -> np.ndarray:
        if camera != CAMERA:
            raise KeyError(camera)
        return np.stack([scene.image for scene in self._scenes])

    def __iter__(self) -> Iterator[str]:
        return iter((CAMERA,))

    def __len__(self) -> int:
        return 1

    def take(self, index: np.ndarray) -> _LazyImages:
        return _LazyImages([self._scenes[i] for i in index])


class _TabletopObservations(Observations):
    """Observations whose rows are rendered one by one, when read: `take` costs nothing for the rows left out."""

    __slots__ = ()

    def take(self, rows: Sequence[int] | np.ndarray) -> Self:
        if not isinstance(self.images, _LazyImages):
            return super().take(rows)
        index = np.asarray(rows, dtype=np.int64)
        return type(self)(self.images.take(index), self.state[index], [self.instruction[i] for i in index])


class Tabletop:
    """B tables.

    images["front"]: u8[B, 48, 48, 3]. state: f32[B, 8] = tip x, y, z [m]; set-point − tip x, y, z [m]; tip velocity
    x, y [m/s]. instruction: "touch the red cube, nothing else". actions: f32[B, 3] in [-1, 1], larger ones are
    clipped; 1 moves the pusher's set-point by 3 cm. One step is 40 ms of physics.
    """

    class Options(Section):
        """Options of `environment.options` when `environment.name` is tabletop."""

        shaping: float = Field(
            default=0.0,
            ge=0,
            description="Adds this × decimetres by which the tip came nearer to the named cube; 0: sparse reward.",
        )
        step_delay_ms: Delay = Field(
            default=Delay(mean=0.0),
            description="Waiting time of each step of a batch, to emulate slow physics: a mean, or {mean, sigma}.",
        )

        @field_validator("step_delay_ms", mode="before")
        @classmethod
        def _mean_alone(cls, value: object) -> object:
            return {"mean": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False

    def __init__(self, rows: int, max_steps: int, options: Tabletop.Options) -> None:
        import mujoco

        self.specification = Specification({CAMERA: (IMAGE_SIZE, IMAGE_SIZE)}, STATE_DIMS, ACTION_DIMS)
        self.max_steps = max_steps
        self._mujoco = mujoco
        self.rows = rows
        self._shaping = options.shaping
        self._delay = options.step_delay_ms
        self._delay_random: np.random.Generator | None = None  # seeded by the first reset
        self._geometry = _geometry(mujoco)
        self._renderer = _Renderer(mujoco, self._geometry)
        self._data = [mujoco.MjData(self._geometry.model) for _ in range(rows)]
        self._scenes = [_Scene(self._renderer, data.qpos.copy()) for data in self._data]
        self._steps = np.zeros(rows, dtype=np.int64)
        self._targets = np.zeros(rows, dtype=np.int64)
        for row in range(rows):
            self._reset_row(row, seed=0)

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """See the protocol: each row from its seed alone, bit for bit."""
        if mask.shape != (self.rows,) or seeds.shape != (self.rows,):
            raise EnvironmentFailed(
                f"tabletop: got mask{list(mask.shape)} and seeds{list(seeds.shape)}, expected [{self.rows}] each"
            )
        for row in map(int, np.flatnonzero(mask)):
            if self._delay_random is None:
                self._delay_random = np.random.default_rng(int(seeds[row]))
            self._reset_row(row, int(seeds[row]))
        return self._observations()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """See the protocol. Raises EnvironmentFailed for actions of another shape or dtype, or not finite."""
        check_actions("tabletop", actions, active, self.rows, ACTION_DIMS)
        if self._delay.mean > 0 and self._delay_random is not None:
            time.sleep(self._delay.draw_ms(self._delay_random) / 1000)
        reward = np.zeros(self.rows, dtype=np.float32)
        terminated, truncated, success = (np.zeros(self.rows, dtype=bool) for _ in range(3))
        for row in map(int, np.flatnonzero(active)):
            before = self._distance_m(row) if self._shaping else 0.0
            named, other = self._step_row(row, actions[row])
            self._steps[row] += 1
            success[row] = named and not other
            terminated[row] = named or other
            truncated[row] = not terminated[row] and self._steps[row] >= self.max_steps
            reward[row] = success[row]
            if self._shaping:
                reward[row] += self._shaping * (before - self._distance_m(row)) * 10
        return StepResult(self._observations(), reward, terminated, truncated, success)

    def expert_actions(self) -> np.ndarray:
        """Fly over the cubes to above the named one, then descend onto it: f32[B, 3]."""
        actions = np.zeros((self.rows, ACTION_DIMS), dtype=np.float32)
        for row, data in enumerate(self._data):
            tip, lead = self._tip(data), self._lead(data)
            aside = self._cube(row)[:2] - tip[:2]
            above = float(np.hypot(*aside)) < _CUBE_HALF_M / 2
            goal = np.array([*aside, (_CUBE_HALF_M if above else _HOVER_M) - tip[2]]) - lead
            actions[row] = np.clip(goal / _STEP_M, -1, 1)
        return actions

    def grounding_targets(self) -> np.ndarray:
        """See the protocol: the centre of the named cube as the camera sees it."""
        targets = np.empty((self.rows, 2), dtype=np.float32)
        for row in range(self.rows):
            x, y, depth = _camera_axes().T @ (self._cube(row) - _CAMERA_M)
            half = depth * math.tan(math.radians(_CAMERA_FOVY_DEG) / 2)
            targets[row] = x / half, y / half
        return targets

    def close(self) -> None:
        """See the protocol."""
        self._data.clear()
        self._scenes.clear()

    def _reset_row(self, row: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        data = self._data[row]
        self._mujoco.mj_resetData(self._geometry.model, data)
        tip = np.array([*random.uniform(-_TIP_SPREAD_M, _TIP_SPREAD_M, 2), random.uniform(*_TIP_START_M)])
        data.qpos[:3] = data.ctrl[:] = tip
        for cube, (place, yaw) in enumerate(zip(_cube_places(random), random.uniform(-0.4, 0.4, 3), strict=True)):
            pose = data.qpos[3 + 7 * cube : 10 + 7 * cube]
            pose[:] = *place, _CUBE_HALF_M, math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)
        self._targets[row] = random.integers(len(COLOURS))
        self._steps[row] = 0
        self._mujoco.mj_forward(self._geometry.model, data)
        self._scenes[row] = _Scene(self._renderer, data.qpos.copy())

    def _step_row(self, row: int, action: np.ndarray) -> tuple[bool, bool]:
        """Physics of one step; whether the named cube and whether another one were touched."""
        data, geometry = self._data[row], self._geometry
        tip = self._tip(data)
        goal = data.ctrl + np.clip(action, -1, 1) * _STEP_M
        data.ctrl[:] = np.clip(np.clip(goal, tip - _LEAD_M, tip + _LEAD_M), _WORKSPACE_LOW, _WORKSPACE_HIGH)
        touched = np.zeros(len(geometry.cube_geoms), dtype=bool)
        for _ in range(_SUBSTEPS):
            self._mujoco.mj_step(geometry.model, data)
            pairs = data.contact.geom
            # A light cube may bounce off within a step, so every substep is looked at.
            pushed = pairs[(pairs == geometry.pusher_geom).any(axis=1)]
            if len(pushed):
                touched |= np.isin(geometry.cube_geoms, pushed)
        self._scenes[row] = _Scene(self._renderer, data.qpos.copy())
        target = self._targets[row]
        return bool(touched[target]), bool(np.delete(touched, target).any())

    def _observations(self) -> Observations:
        state = np.empty((self.rows, STATE_DIMS), dtype=np.float32)
        for row, data in enumerate(self._data):
            state[row] = *self._tip(data), *self._lead(data), *data.qvel[:2]
        colours = list(COLOURS)
        instruction = [f"touch the {colours[target]} cube, nothing else" for target in self._targets]
        return _TabletopObservations(_LazyImages(list(self._scenes)), state, instruction)

    def _tip(self, data: Any) -> np.ndarray:
        position: np.ndarray = data.qpos[:3]
        return position

    def _lead(self, data: Any) -> np.ndarray:
        lead: np.ndarray = data.ctrl - data.qpos[:3]
        return lead

    def _cube(self, row: int) -> np.ndarray:
        start = 3 + 7 * int(self._targets[row])
        centre: np.ndarray = self._data[row].qpos[start : start + 3]
        return centre

    def _distance_m(self, row: int) -> float:
        return float(np.linalg.norm(self._cube(row) - self._tip(self._data[row])))


class _Renderer:
    """One ray per pixel from the fixed camera; the nearest body's colour."""

    def __init__(self, mujoco: ModuleType, geometry: _Geometry) -> None:
        self._mujoco = mujoco
        # mujoco 3.9 put a `normal` argument between `dist` and `nray`.
        self._normal = (None,) if "normal" in (mujoco.mj_multiRay.__doc__ or "") else ()
        self._geometry = geometry
        self._data = mujoco.MjData(geometry.model)
        count = len(geometry.rays)
        self._flat_rays = np.ascontiguousarray(geometry.rays.reshape(-1))
        self._hit = np.empty(count, dtype=np.int32)
        self._distance = np.empty(count, dtype=np.float64)

    def image(self, positions: np.ndarray) -> np.ndarray:
        """u8[48, 48, 3] of the joint positions f64[24] (qpos)."""
        self._data.qpos[:] = positions
        self._mujoco.mj_kinematics(self._geometry.model, self._data)
        outputs = (self._hit, self._distance, *self._normal)
        count = len(self._hit)
        self._mujoco.mj_multiRay(
            self._geometry.model, self._data, _CAMERA_M, self._flat_rays, None, True, -1, *outputs, count, 10.0
        )
        image: np.ndarray = self._geometry.colours[self._hit].reshape(IMAGE_SIZE, IMAGE_SIZE, 3)
        return image


def _cube_places(random: np.random.Generator) -> np.ndarray:
    """f64[3, 2], uniform on the table among the triples that keep their distance."""
    while True:
        places: np.ndarray = random.uniform(-_CUBE_SPREAD_M, _CUBE_SPREAD_M, (len(COLOURS), 2))
        gaps = np.linalg.norm(places - np.roll(places, 1, axis=0), axis=1)
        if (gaps > _CUBE_DISTANCE_M).all():
            return places


def _camera_axes() -> np.ndarray:
    """Columns: the image's right, its down, and the viewing direction, which meets the table's centre."""
    forward = -_CAMERA_M / np.linalg.norm(_CAMERA_M)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    return np.column_stack([right, np.cross(forward, right), forward])


def _geometry(mujoco: ModuleType) -> _Geometry:
    model = mujoco.MjModel.from_xml_string(_xml())
    pusher = model.geom("pusher").id
    cubes = np.array([model.geom(name).id for name in COLOURS])
    colours = np.array([_TABLE_COLOUR] * (model.ngeom + 1), dtype=np.uint8)
    colours[pusher], colours[-1] = _PUSHER_COLOUR, _FAR_COLOUR
    colours[cubes] = list(COLOURS.values())
    half = math.tan(math.radians(_CAMERA_FOVY_DEG) / 2)
    pixels = ((np.arange(IMAGE_SIZE) + 0.5) / IMAGE_SIZE * 2 - 1) * half
    x, y = np.meshgrid(pixels, pixels)
    rays = np.stack([x, y, np.ones_like(x)], axis=-1).reshape(-1, 3) @ _camera_axes().T
    return _Geometry(model, pusher, cubes, colours, rays / np.linalg.norm(rays, axis=1, keepdims=True))


def _xml() -> str:
    slides = "".join(
        f'<joint name="{axis}" type="slide" axis="{vector}"/>'
        for axis, vector in (("x", "1 0 0"), ("y", "0 1 0"), ("z", "0 0 1"))
    )
    cubes = "".join(
        f'<body name="{name}" pos="0 {0.1 * (i - 1)} {_CUBE_HALF_M}"><freejoint/>'
        f'<geom name="{name}" type="box" size="{_CUBE_HALF_M} {_CUBE_HALF_M} {_CUBE_HALF_M}" mass="0.05"/></body>'
        for i, name in enumerate(COLOURS)
    )
    motors = "".join(f'<position joint="{axis}" kp="400"/>' for axis in "xyz")
    # The pusher's body frame is its tip, so that qpos[:3] is the tip's position.
    return f"""
    <mujoco>
      <option timestep="0.008" integrator="implicitfast"/>
      <worldbody>
        <geom name="table" type="plane" size="0.3 0.3 0.01"/>
        <body name="pusher" gravcomp="1">
          {slides.replace("/>", ' damping="24"/>')}
          <geom name="pusher" type="cylinder" size="0.012 0.04" pos="0 0 0.04" mass="0.2"/>
        </body>
        {cubes}
      </worldbody>
      <actuator>{motors}</actuator>
    </mujoco>"""
